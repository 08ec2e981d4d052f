"""The policy may call tools, and talk with a user; without one the conversation is over when it calls none."""

from collections.abc import Mapping, Sequence

from tandem.rollout.conversation_images import Content, appended
from tandem.rollout.environment import Answer, Counts, Reply, ToolSchema
from tandem.rollout.tools.calls import Calls, Toolbox
from tandem.rollout.users.base import User, Users
from tandem.types import Message, Prompt


class ToolEnvironments:
    """Environments that share one toolbox, and where users come from."""

    def __init__(self, toolbox: Toolbox, users: Users | None) -> None:
        self._toolbox = toolbox
        self._users = users

    async def open(self) -> None:
        await self._toolbox.open()
        if self._users is not None:
            await self._users.open()

    def make(self, prompt: Prompt) -> "ToolEnvironment":
        return ToolEnvironment(self._toolbox, prompt, self._users.make(prompt) if self._users else None)

    async def close(self) -> None:
        await self._toolbox.close()
        if self._users is not None:
            await self._users.close()


class ToolEnvironment:
    """One trajectory's tools, and its user."""

    def __init__(self, toolbox: Toolbox, prompt: Prompt, user: User | None) -> None:
        self._toolbox = toolbox
        self._counts = Counts()
        self._calls = Calls(toolbox, prompt, self._counts)
        self._user = user
        self._messages: list[Message] = []
        """What was said so far, for the user."""

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return self._toolbox.schemas

    @property
    def numbers(self) -> Mapping[str, float]:
        return self._counts.values

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        messages = with_more(opening_messages(prompt), await self._calls.start())
        if self._user is not None:
            await self._user.start(prompt)
        self._messages = list(messages)
        return messages

    async def step(self, answer: Answer) -> Reply:
        self._messages.append(answer.message())
        if answer.tool_calls or answer.broken:
            reply = Reply(*await self._calls.answer(answer))
        elif self._user is not None:
            said = await self._user.reply(self._messages)
            reply = Reply([] if said.text is None else [{"role": "user", "content": said.text}], said.reward)
        else:
            return Reply()
        self._messages += reply.messages
        return reply

    async def close(self) -> float | None:
        """Closes the tools and the user, also where one of them cannot be."""
        rewards: list[float | None] = []
        try:
            rewards.append(await self._calls.close())
        finally:
            rewards.append(await self._user.close() if self._user is not None else None)
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None


def opening_messages(prompt: Prompt) -> list[Message]:
    """Those of the row."""
    return as_messages(prompt.row.get("prompt", prompt.text))


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Those of a row's column `prompt`; one that is a string is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def with_more(messages: list[Message], content: Content) -> list[Message]:
    """The messages, with `content` at the end of the last one."""
    if content:
        messages[-1] = {**messages[-1], "content": appended(messages[-1]["content"], content)}
    return messages
