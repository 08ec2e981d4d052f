"""The MCP servers of a JSON file as other programs have it."""

from typing import TYPE_CHECKING, Literal

from tandem.config.paths import LocalPath
from tandem.rollout.tools.builtin.mcp import McpConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class McpFileConfig(McpConfig):
    """The tools of all MCP servers of a JSON file as other programs have it: `{"mcpServers": {NAME: {url, auth_token,
    headers} or {command, args, env}}}`. `${VARIABLE}` in its values is the environment variable."""

    type: Literal["mcp_file"]
    path: LocalPath

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.mcp_servers import mcp_file_servers, mcp_tools

        return mcp_tools(mcp_file_servers(self), limits)
