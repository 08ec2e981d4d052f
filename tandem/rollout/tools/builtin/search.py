"""Search in an index of passages, in this process."""

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.config.base import MayChange, PositiveInt
from tandem.config.paths import LocalPath
from tandem.config.tools import ToolsConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class SearchToolsConfig(ToolsConfig):
    """Search in an index of passages, which each rank reads itself: `tandem search index` makes one."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("description",)

    type: Literal["search"]
    index: LocalPath
    name: str = "search"
    """What the policy calls the tool."""
    description: str = "Find passages that fit a query."
    """What the policy is told of it."""
    passages: PositiveInt = 3
    """How many a call brings that does not say."""
    most_passages: PositiveInt = 10
    """How many a call may ask for. With 1 the tool has no argument `k`."""
    calls_at_once: MayChange[PositiveInt] = 4

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.search_tool import SearchTools

        return [SearchTools(self, limits)]
