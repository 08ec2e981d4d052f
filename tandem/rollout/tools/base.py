"""The seam: a call of the policy -> what a tool says.

ToolSet (shared by all trajectories) --session(prompt)--> ToolSession (one trajectory's) --call--> ToolResult
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.rollout.conversation_images import Content
from tandem.rollout.environment import ToolSchema
from tandem.types import Prompt


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call brings."""

    content: Content
    """Text, or parts of text and of pictures: {"type": "image", "image": what the picture is made of}."""
    reward: float | None = None
    """What the tool gives for this call, where it gives rewards; it counts for the turn that made the call."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers, which become metrics."""


class ToolError(Exception):
    """The call did not succeed; the message is said back to the policy."""


class CallLimits:
    """How many calls run at once, and how long each may take; shared by all tool sets of a process."""

    def __init__(self, calls_at_once: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.slots = asyncio.Semaphore(calls_at_once)
        """For what keeps the time itself; others use `sent`."""

    @asynccontextmanager
    async def sent(self) -> AsyncGenerator[None]:
        """Around what sends a call and waits for the result: waits for its turn, and then counts the time. Raises
        TimeoutError, which the policy is told. A set that allows fewer calls at once waits for its own turn before."""
        async with self.slots, asyncio.timeout(self.timeout_s):
            yield

    @asynccontextmanager
    async def in_time(self) -> AsyncGenerator[None]:
        """Around what a trajectory begins or ends with: no call, so that it waits for no turn. Raises TimeoutError."""
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no end within {self.timeout_s:g} s") from error


class ToolSession(Protocol):
    """The tools of one trajectory, with what they remember from call to call."""

    async def start(self) -> Content | None:
        """Before the first turn, once. What it returns is appended to the last message of the prompt. Raises as `call`
        does, but for ToolError."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the set once: whatever happens, a call that was sent is not sent again.

        Raises ToolError where the policy should be told why there is no result, TimeoutError where it took too long,
        and EnvironmentFailed where the world is broken, so that the trajectory is begun anew.
        """
        ...

    async def close(self) -> float | None:
        """Free what it holds; also where `start` failed. Returns the tools' reward for the whole trajectory, where they
        give one."""
        ...


class MakesTools(Protocol):
    """A section of `conversation.environment.tools`."""

    def tool_sets(self, limits: CallLimits, result_characters: int) -> "list[ToolSet]":
        """Its sets, of which nothing is opened yet. `result_characters`: the longest result that the policy is shown.
        Raises UserError where something that the section names is not there, or is not what it must be."""
        ...


class ToolSet(Protocol):
    """Tools that come from one place, such as a server."""

    async def open(self) -> None:
        """Before the first session: connect, and learn which tools there are. Raises UserError where that fails."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """Of every tool; known after `open`, and before it where nothing has to be reached for it. Empty until then."""
        ...

    def session(self, prompt: Prompt) -> ToolSession:
        """For one trajectory on this prompt. Cheap: work belongs into the first call."""
        ...

    async def close(self) -> None:
        """After the last session."""
