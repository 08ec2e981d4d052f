"""The seam: what the policy says -> what the world answers.

    prompt --start--> messages --> the policy --Answer--> step --Reply--> the policy … until the end --> close

An environment sees messages and never tokens: those are `tandem.rollout.formats`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.types import Message, Prompt

ToolSchema = Mapping[str, Any]
"""A tool as chat templates and OpenAI's interface describe it: `{type: function, function: {name, description,
parameters}}`, parameters being a JSON schema."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy has made, and that can be read."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn of the policy says."""

    content: str
    """Without thinking and calls; but a call that cannot be read is text like any other."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """What it thought before; None where it did not."""
    broken: tuple[str, ...] = ()
    """Why calls in it cannot be read, one sentence each, to be said back to it."""

    def message(self) -> Message:
        """The turn as a message for a chat template."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Reply:
    """What the world says to a turn of the policy. Without messages the conversation is over."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    """For this turn, where the environment gives rewards; those of all turns are summed."""


class EnvironmentFailed(Exception):
    """The environment is broken, whatever the policy said; the message says how. Any other exception means the same."""


def finite(number: Any, what: str) -> float:
    """Any single number as a float: Python's, numpy's, a tensor of one. Raises EnvironmentFailed where it is none."""
    try:
        value = math.nan if isinstance(number, str | bytes) else float(number)
    except Exception:  # noqa: BLE001 - the user's types may raise anything; whole numbers may be too large
        value = math.nan
    if not math.isfinite(value):
        raise EnvironmentFailed(f"{what} is {_shown(number)}, which is no finite number")
    return value


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except Exception as error:  # noqa: BLE001 - the user's types; whole numbers of more than 4,300 digits
        return f"{type(value).__name__}, which cannot be shown ({error})"


class Environment(Protocol):
    """The world of one conversation, with a state of its own: `start` once, `step` after each turn of the policy until
    one is answered without messages, and `close` in the end, whatever happened.

    An exception out of `start` or `step` is the environment's own failure: the conversation is begun anew with a fresh
    environment, a few times, and then masked out and counted. What the policy does wrong, such as calling a tool that
    does not exist, is no failure: a reply tells it.
    """

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """What the policy is told that it may call; known after `start`, and the same from then on."""
        ...

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        """The messages that open the conversation: those of the row's prompt, as a rule."""
        ...

    async def step(self, answer: Answer) -> Reply: ...

    async def close(self) -> float | None:
        """Free what the conversation holds; also after a failure, and where the conversation is cut short.

        Returns a reward for the whole conversation, where the environment gives one beside those of its turns.
        """

    @property
    def numbers(self) -> Mapping[str, float]:
        """What was counted so far, such as calls of tools: each becomes a metric, `conversation/NAME`."""
        ...


class Environments(Protocol):
    """Makes the environments of a run, and owns what they share, such as connections to servers."""

    async def open(self) -> None:
        """Before the first environment. Raises UserError where something shared is not there, as a server."""

    def make(self, prompt: Prompt) -> Environment:
        """A fresh one for one trajectory. Cheap: work belongs into `start`."""
        ...

    async def close(self) -> None:
        """After the last one."""


@dataclass(slots=True)
class Counts:
    """Numbers by name."""

    values: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, number: float = 1.0) -> None:
        self.values[name] = self.values.get(name, 0.0) + number
