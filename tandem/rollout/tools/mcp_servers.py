"""Where MCP servers are: configuration, `mcpServers` JSON, verl's tool YAML -> McpServer, secrets filled in.

The program's environment is read here and nowhere else: secrets are in no configuration, and so in no run directory.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tandem.errors import UserError
from tandem.rollout.tools.base import CallLimits, ToolSet
from tandem.rollout.tools.builtin.mcp import McpToolsConfig
from tandem.rollout.tools.builtin.mcp_file import McpFileConfig
from tandem.stored import read_json

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_KNOWN_KEYS = {"url", "auth_token", "headers", "command", "args", "env", "type", "transport", "name", "description"}
_HTTP_TRANSPORTS = ("http", "streamable-http", "streamable_http", "streamableHttp")


@dataclass(frozen=True, slots=True)
class McpServer:
    """One server, and which of its tools are wanted. Secrets do not show in its representation."""

    name: str
    """What messages call it."""
    url: str | None = None
    """None: `command` starts it."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    include: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    per_trajectory: bool = False
    connect_timeout_s: float = 60.0
    calls_at_once: int = 16
    calls_per_s: float | None = None
    """The most calls that are sent in a second; None: any number."""
    timeout_s: float | None = None
    """For a call, where it is shorter than the limit of all tools."""


def mcp_server(config: McpToolsConfig) -> McpServer:
    """Raises UserError where an environment variable that it names is not set."""
    name = config.url or " ".join(config.command)
    headers = {}
    if config.token_variable is not None:
        headers["Authorization"] = f"Bearer {_variable(config.token_variable, f'{name}: token_variable')}"
    passed = {variable: _variable(variable, f"{name}: pass_variables") for variable in config.pass_variables}
    return McpServer(
        name,
        url=config.url,
        headers=headers,
        command=tuple(config.command),
        env={**config.env, **passed},
        **_shared(config),
    )


def mcp_file_servers(config: McpFileConfig) -> list[McpServer]:
    """Raises UserError where the file is not what it must be."""
    return _read_file(config.path, **_shared(config))


def verl_mcp_servers(entry: Mapping[str, Any], path: Path) -> list[McpServer]:
    """The servers of an entry of verl's tool YAML with `config: {type: mcp, rate_limit, timeout}` and `mcp:
    {mcp_servers_config_path, tool_selected_list}`.

    `rate_limit` is calls a second, `timeout` seconds a call. `path` is the file that the entry stands in: relative
    paths start at the working directory, as in verl, or else beside it. Raises UserError.
    """
    config, mcp = entry.get("config") or {}, entry.get("mcp") or {}
    given = mcp.get("mcp_servers_config_path")
    if not given:
        raise UserError(f"{path}: an entry of type mcp names no file; set mcp.mcp_servers_config_path")
    file = Path(str(given)).expanduser()
    file = file if file.is_absolute() or file.exists() else path.parent / file
    selected = mcp.get("tool_selected_list")
    limits: dict[str, Any] = {"calls_per_s": config.get("rate_limit"), "timeout_s": config.get("timeout")}
    for key, value in limits.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise UserError(f"{path}: config: {key.partition('_')[0]}: {value!r} is no number above 0")
    return _read_file(file, include=frozenset(map(str, selected)) if selected else None, **limits)


def _shared(config: McpToolsConfig | McpFileConfig) -> dict[str, Any]:
    return {
        "include": None if config.include is None else frozenset(config.include),
        "exclude": frozenset(config.exclude),
        "per_trajectory": config.connection == "trajectory",
        "connect_timeout_s": config.connect_timeout_s,
        "calls_at_once": config.calls_at_once,
    }


def _read_file(path: Path, **shared: Any) -> list[McpServer]:
    read = read_json(path, dict[str, Any], "give the file of MCP servers")
    servers = read.get("mcpServers")
    if not isinstance(servers, dict) or not servers:
        raise UserError(f'{path}: holds no servers; write {{"mcpServers": {{NAME: {{"url": …}}}}}}')
    return [_of_entry(name, entry, f"{path}: server {name!r}", shared) for name, entry in servers.items()]


def _of_entry(name: str, entry: Any, where: str, shared: Mapping[str, Any]) -> McpServer:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: is no object with a url or a command")
    entry = cast(dict[str, Any], _filled_in(entry, where))
    if unknown := entry.keys() - _KNOWN_KEYS:
        raise UserError(f"{where}: unknown key {min(unknown)!r}; known are {', '.join(sorted(_KNOWN_KEYS))}")
    url, command = entry.get("url"), entry.get("command")
    if (url is None) == (command is None):
        raise UserError(f"{where}: give one of url and command")
    transport = entry.get("transport", entry.get("type"))
    if transport is not None and transport not in (("stdio",) if url is None else _HTTP_TRANSPORTS):
        raise UserError(f"{where}: transport {transport!r} is not supported; serve it by stdio or streamable HTTP")
    if url is None:
        command = (str(command), *map(str, _items(entry, "args", list, where)))
        return McpServer(name, command=command, env=_texts(entry, "env", where), **shared)
    headers = _texts(entry, "headers", where)
    if entry.get("auth_token"):
        headers["Authorization"] = f"Bearer {entry['auth_token']}"
    return McpServer(name, url=str(url), headers=headers, **shared)


def _items(entry: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = entry.get(key) or kind()
    if not isinstance(value, kind):
        raise UserError(f"{where}: {key}: is no {'list' if kind is list else 'object'}")
    return value


def _texts(entry: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    return {str(name): str(value) for name, value in _items(entry, key, dict, where).items()}


def _filled_in(value: Any, where: str) -> Any:
    """The value with `${NAME}` and `${NAME:-default}` in its texts replaced by environment variables."""
    if isinstance(value, dict):
        return {name: _filled_in(inner, where) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled_in(inner, where) for inner in value]
    if not isinstance(value, str):
        return value
    return _VARIABLE.sub(lambda found: _variable(found[1], where, default=found[2]), value)


def _variable(name: str, where: str, *, default: str | None = None) -> str:
    value = os.environ.get(name) or default
    if value is None:
        raise UserError(f"{where}: the environment variable {name} is not set; export it before the run")
    return value


def mcp_tools(servers: Sequence[McpServer], limits: CallLimits) -> list[ToolSet]:
    """A tool set for each server. Raises UserError where the packages are missing."""
    if not servers:
        return []
    try:
        from tandem.rollout.tools.mcp_tools import McpTools
    except ModuleNotFoundError as error:
        raise UserError(
            f"tools of MCP servers need {error.name}: pip install -e '.[agents]' in a clone of Tandem"
        ) from None
    return [McpTools(server, limits) for server in servers]
