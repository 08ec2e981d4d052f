"""The tools of a file of verl."""

from typing import TYPE_CHECKING, Literal

from tandem.config.base import MayChange, PositiveInt
from tandem.config.paths import LocalPath
from tandem.config.tools import ToolsConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class VerlToolsConfig(ToolsConfig):
    """The tools of a verl file: `tools: [{class_name, config, tool_schema}]`, those of MCP servers included."""

    type: Literal["verl"]
    path: LocalPath
    calls_at_once: MayChange[PositiveInt] = 64

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.mcp_servers import mcp_tools, verl_mcp_servers
        from tandem.rollout.tools.verl_tools import VerlTools, mcp_entries

        servers = [server for entry in mcp_entries(self) for server in verl_mcp_servers(entry, self.path)]
        return [VerlTools(self, limits), *mcp_tools(servers, limits)]
