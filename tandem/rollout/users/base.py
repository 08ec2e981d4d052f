"""The seam: the conversation so far -> what the user says next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.types import Message, Prompt


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user says to an answer of the policy."""

    text: str | None
    """None: nothing more; the conversation is over."""
    reward: float | None = None
    """For the answer, where the user gives rewards."""


class User(Protocol):
    """The user of one conversation. Whatever it raises is a failure of the environment."""

    async def start(self, prompt: Prompt) -> None:
        """Before the policy's first turn; the prompt is what the user has said."""

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        """To the last of `messages`, an answer of the policy without calls of tools; the prompt's come first."""
        ...

    async def close(self) -> float | None:
        """Returns a reward for the whole conversation, where the user gives one."""
        ...


class Users(Protocol):
    """Makes the users of a run."""

    async def open(self) -> None:
        """Before the first one. Raises UserError."""

    def make(self, prompt: Prompt) -> User: ...

    async def close(self) -> None: ...
