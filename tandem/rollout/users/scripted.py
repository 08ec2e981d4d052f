"""A user whose words are a column of the data."""

from collections.abc import Sequence

from tandem.config.conversation import ScriptedUserConfig
from tandem.rollout.environment import EnvironmentFailed
from tandem.rollout.users.base import User, UserTurn
from tandem.types import Message, Prompt


class ScriptedUsers:
    """Users that say what their row lists, one entry after each answer of the policy."""

    def __init__(self, config: ScriptedUserConfig) -> None:
        self._column = config.column

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> User:
        return _ScriptedUser(self._column)

    async def close(self) -> None: ...


class _ScriptedUser:
    def __init__(self, column: str) -> None:
        self._column = column
        self._words: list[str] = []

    async def start(self, prompt: Prompt) -> None:
        words = prompt.row.get(self._column)
        if not isinstance(words, list) or not all(isinstance(text, str) for text in words):
            raise EnvironmentFailed(
                f"data row {prompt.index}: column `{self._column}` (conversation.environment.user.column) is no list "
                "of strings, what the user says after each answer"
            )
        self._words = list(words)

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        return UserTurn(self._words.pop(0) if self._words else None)

    async def close(self) -> float | None:
        return None
