"""MCP servers whose tools the policy may call (Model Context Protocol, modelcontextprotocol.io)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.config.base import MayChange, PositiveFloat, PositiveInt, rule
from tandem.config.tools import ToolsConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class McpConfig(ToolsConfig):
    """What all ways to MCP servers share."""

    include: list[str] | None = None
    """Names of the tools that the policy gets. Without: all of them."""
    exclude: list[str] = []
    """Names of tools that it does not get."""
    connection: Literal["shared", "trajectory"] = "shared"
    """`trajectory`: each trajectory has a connection of its own, for servers that remember what was done on one; a
    server that is started by a command is then started once a trajectory."""
    connect_timeout_s: MayChange[PositiveFloat] = 60.0
    """For the connection and the list of tools, the start of a server by its command included. A server that is gone is
    waited for as long, before the trajectory that called it is begun anew."""
    calls_at_once: MayChange[PositiveInt] = 16
    """Calls that the server has at once from one rank; others wait for their turn."""


class McpToolsConfig(McpConfig):
    """The tools of an MCP server: one that answers at `url`, or one that `command` starts, once a rank."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("command",)

    type: Literal["mcp"]
    url: str | None = None
    """Of its streamable HTTP endpoint, such as `http://127.0.0.1:8001/mcp`."""
    token_variable: str | None = None
    """The environment variable that holds the token for `url`, which is sent as `Authorization: Bearer`."""
    command: list[str] = []
    """Program and arguments of a server that speaks over its standard input and output."""
    env: dict[str, str] = {}
    """Environment variables for the program. By itself it gets PATH, HOME and the like, and nothing secret."""
    pass_variables: list[str] = []
    """Names of environment variables that the program gets as they are here: secrets stay out of the configuration."""

    @rule()
    def _has_one_way(self) -> Iterator[str]:
        if (self.url is None) == (not self.command):
            yield "give one of `url` and `command`: where the server answers, or what starts it"

    @rule()
    def _has_an_address(self) -> Iterator[str]:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"url: {self.url!r} is no address of a streamable HTTP endpoint, http://HOST:PORT/mcp"

    @rule()
    def _tells_a_program_alone(self) -> Iterator[str]:
        if self.url is not None and not self.command and (self.env or self.pass_variables):
            yield "env and pass_variables are for a `command`; a server at a `url` has its own environment"

    @rule()
    def _shows_its_token_to_a_url(self) -> Iterator[str]:
        if self.url is None and self.command and self.token_variable is not None:
            yield "token_variable is for a `url`; give a `command` its secrets by `pass_variables`"

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.mcp_servers import mcp_server, mcp_tools

        return mcp_tools([mcp_server(self)], limits)
