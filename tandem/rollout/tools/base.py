"""The seam: a call of the policy -> what a tool says.

ToolSet (shared by all trajectories) --session(prompt)--> ToolSession (one trajectory's) --call--> ToolResult
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.rollout.environment import ToolSchema
from tandem.types import Prompt


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call brings."""

    text: str
    reward: float | None = None
    """What the tool gives for this call, where it gives rewards; it counts for the turn that made the call."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers, which become metrics."""


class ToolError(Exception):
    """The call did not succeed; the message is said back to the policy."""


class ToolSession(Protocol):
    """The tools of one trajectory, with what they remember from call to call."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the set once: whatever happens, a call that was sent is not sent again.

        Raises ToolError where the policy should be told why there is no result, and EnvironmentFailed where the world
        is broken, so that the trajectory is begun anew.
        """
        ...

    async def close(self) -> float | None:
        """Free what it holds. Returns the tools' reward for the whole trajectory, where they give one."""
        ...


class ToolSet(Protocol):
    """Tools that come from one place, such as a server."""

    async def open(self) -> None:
        """Before the first session: connect, and learn which tools there are. Raises UserError where that fails."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """Of every tool; known after `open`."""
        ...

    def session(self, prompt: Prompt) -> ToolSession:
        """For one trajectory on this prompt. Cheap: work belongs into the first call."""
        ...

    async def close(self) -> None:
        """After the last session."""
