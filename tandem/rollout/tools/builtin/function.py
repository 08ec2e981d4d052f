"""A Python function, or the methods of a class, as tools."""

from typing import TYPE_CHECKING, Any, Literal

from tandem.config.base import MayChange, PositiveInt
from tandem.config.paths import Reference
from tandem.config.tools import ToolsConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class FunctionToolConfig(ToolsConfig):
    """A Python function, or a class whose public methods are tools."""

    type: Literal["function"] = "function"
    function: Reference
    """`path/to/file.py:name` or `package.module:name`. A function, plain or async, with type hints and a docstring that
    describes each argument. A class: one instance a trajectory, its public methods are tools."""
    arguments: dict[str, Any] = {}
    """What a class is made with."""
    calls_at_once: MayChange[PositiveInt] = 64

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.function_tools import function_tools

        return [function_tools(self, limits)]
