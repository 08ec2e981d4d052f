"""A class of the user's own, `tandem.Environment`: what it returns and raises is looked at before anybody uses it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from tandem.config.conversation import OwnEnvironmentConfig
from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.environment import Answer, Environment, EnvironmentFailed, Reply, ToolSchema
from tandem.rollout.users_code import exceptions_only
from tandem.types import Message, Prompt


class OwnEnvironments:
    """Those of a class of the user's."""

    def __init__(self, config: OwnEnvironmentConfig) -> None:
        """Raises UserError where there is no such class."""
        self._kind = load_named(config.environment, "conversation.environment.environment:")
        if not callable(self._kind):
            raise UserError(f"conversation.environment.environment: there is no class {config.environment!r}")
        if wrong := next(_mistakes(self._kind, config.arguments), None):
            raise UserError(f"conversation.environment.environment: {config.environment}: {wrong}")
        self._config = config

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> Environment:
        return _OwnEnvironment(self._kind, self._config)

    async def close(self) -> None: ...


class _OwnEnvironment:
    """One instance, from `start` on. Its methods raise EnvironmentFailed where they return what nobody can use, or take
    too long."""

    def __init__(self, kind: Callable[..., Any], config: OwnEnvironmentConfig) -> None:
        self._kind = kind
        self._config = config
        self._name = config.environment.rpartition(":")[2]
        self._made: Any = None

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return self._made.tools

    @property
    def numbers(self) -> Mapping[str, float]:
        return self._made.numbers

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        with exceptions_only():
            self._made = self._kind(**self._config.arguments)
        messages = self._messages("start", await self._in_time(self._made.start, prompt))
        if not isinstance(self.tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in self.tools):
            raise EnvironmentFailed(f"{self._name}.tools are {self.tools!r:.200}, no list of schemas")
        return messages

    async def step(self, answer: Answer) -> Reply:
        reply = await self._in_time(self._made.step, answer)
        if not isinstance(reply, Reply):
            raise EnvironmentFailed(f"{self._name}.step returned {reply!r:.200}, no tandem.Reply")
        return Reply(self._messages("step", reply.messages), reply.reward)

    async def close(self) -> float | None:
        return None if self._made is None else await self._in_time(self._made.close)

    async def _in_time(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        try:
            with exceptions_only():
                async with asyncio.timeout(self._config.timeout_s):
                    return await method(*arguments)
        except TimeoutError as error:
            limit = f"no end within {self._config.timeout_s:g} s"
            raise EnvironmentFailed(f"{self._name}.{method.__name__}: {str(error) or limit}") from error

    def _messages(self, method: str, given: Any) -> list[Message]:
        if not isinstance(given, list | tuple):
            raise EnvironmentFailed(f"{self._name}.{method} gave {given!r:.200}, no list of messages")
        for message in given:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise EnvironmentFailed(f"{self._name}.{method} gave a message {message!r:.200}, without a role")
            content: Any = message.get("content")
            if not isinstance(content, str | list | None):
                kind = type(content).__name__
                raise EnvironmentFailed(f"{self._name}.{method} gave a message whose content is {kind}, no text")
        return list(given)


def _mistakes(kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    """What can be said of the class before an instance is made."""
    if inspect.isclass(kind):
        for method in ("start", "step", "close"):
            if not inspect.iscoroutinefunction(getattr(kind, method, None)):
                yield f"its `{method}` must be a method, and `async def`; tandem.Environment lists them"
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        yield f"it does not take conversation.environment.arguments: {error}"
    except ValueError:  # of some built-in types nobody knows what they take
        pass
