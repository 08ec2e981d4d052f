"""Tools written for verl: a YAML file that names classes, each with the methods create, execute, calc_reward, release.

    tools:
      - class_name: my_package.tools.Search
        config: {type: native}
        tool_schema: {type: function, function: {name, description, parameters}}

A row may have arguments for them: `extra_info.tools_kwargs: {name: {create_kwargs, execute_kwargs, …}}`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.conversation_images import Content, appended
from tandem.rollout.environment import EnvironmentFailed, ToolSchema
from tandem.rollout.tools.base import CallLimits, ToolError, ToolResult, ToolSession
from tandem.rollout.tools.builtin.verl import VerlToolsConfig
from tandem.rollout.users_code import call, exceptions_only
from tandem.stored import DamagedFile, read_yaml
from tandem.types import Prompt

_KEY = "conversation.environment.tools"


class _Open(BaseModel):
    """What a tool's class reads of its schema: attributes, and `model_dump` of what the file has."""

    model_config = ConfigDict(extra="allow")


class _Parameters(_Open):
    type: str = "object"
    properties: dict[str, _Open] = {}
    required: list[str] = []


class _Function(_Open):
    name: str
    description: str = ""
    parameters: _Parameters = _Parameters()


class _Schema(_Open):
    type: str = "function"
    function: _Function


class VerlTools:
    """The tools of one file whose classes run in this process."""

    def __init__(self, config: VerlToolsConfig, limits: CallLimits) -> None:
        """Raises UserError where the file is none of this kind, or names what is not there."""
        self._limits = limits
        self._slots = asyncio.Semaphore(config.calls_at_once)
        self._schemas: list[ToolSchema] = []
        self._tools: dict[str, Any] = {}
        for entry in _entries(config):
            if _is_mcp(entry):
                continue  # they have their own sets
            schema = _schema_of(entry, config)
            self._schemas.append(schema)
            self._tools[schema["function"]["name"]] = _make(entry, schema, config)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def open(self) -> None: ...

    def session(self, prompt: Prompt) -> ToolSession:
        return _VerlSession(self._tools, prompt, self._limits, self._slots)

    async def close(self) -> None: ...


class _VerlSession:
    """The instances of one trajectory, by tool."""

    def __init__(self, tools: Mapping[str, Any], prompt: Prompt, limits: CallLimits, slots: asyncio.Semaphore) -> None:
        self._tools = tools
        self._limits = limits
        self._slots = slots
        extra: Mapping[str, Any] = prompt.row.get("extra_info") or {}
        self._arguments: Mapping[str, Mapping[str, Any]] = extra.get("tools_kwargs") or {}
        self._instances: dict[str, str] = {}
        self._creating = asyncio.Lock()
        """The first calls of a turn share an instance."""

    async def start(self) -> str | None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool = self._tools[name]
        async with self._slots, self._limits.sent():
            async with self._creating:
                if name not in self._instances:
                    self._instances[name] = await self._create(name)
            try:
                result = await call(
                    tool.execute, self._instances[name], dict(arguments), **self._given(name, "execute")
                )
            except (EnvironmentFailed, TimeoutError):
                raise
            except Exception as error:  # the user's code may raise anything; the policy is told
                raise ToolError(f"{type(error).__name__}: {error}") from error
        return _read_result(name, result)

    async def close(self) -> float | None:
        """Also where one tool fails the others' instances are released."""
        given = await asyncio.gather(*(self._end(*one) for one in self._instances.items()), return_exceptions=True)
        for reward in given:
            if isinstance(reward, BaseException):
                raise reward
        rewards = [reward for reward in given if isinstance(reward, float)]
        return sum(rewards) if rewards else None

    async def _end(self, name: str, instance: str) -> float | None:
        """Release an instance. Its reward for the trajectory."""
        tool = self._tools[name]
        try:
            async with self._limits.in_time():
                try:
                    reward = await call(tool.calc_reward, instance, **self._given(name, "calc_reward"))
                finally:
                    await call(tool.release, instance, **self._given(name, "release"))
            return None if reward is None else float(reward)
        except Exception as error:  # the user's code may raise anything
            raise EnvironmentFailed(f"{name}: {type(error).__name__}: {error}") from error

    async def _create(self, name: str) -> str:
        """The id of a fresh instance. verl's versions return it alone, or with what the tool says."""
        try:
            made = await call(self._tools[name].create, uuid4().hex, **self._given(name, "create"))
        except Exception as error:  # the user's code may raise anything
            raise EnvironmentFailed(f"{name}: create: {type(error).__name__}: {error}") from error
        return str(made[0] if isinstance(made, tuple) else made)

    def _given(self, name: str, method: str) -> Mapping[str, Any]:
        own = self._arguments.get(name) or {}
        return own.get(f"{method}_kwargs") or {}


def _read_result(name: str, result: Any) -> ToolResult:
    """(response, reward, numbers), of which the response is text, or has a `text` and an `image`, one or a list of
    them, which verl puts before the text."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise EnvironmentFailed(f"{name}: execute returned {result!r:.200}, not (response, reward, metrics)")
    response, reward, numbers = result
    content: Content = response if isinstance(response, str) else response.text or ""
    if images := getattr(response, "image", None):
        listed = images if isinstance(images, list | tuple) else [images]
        content = appended([{"type": "image", "image": image} for image in listed], content)
    found = {key: float(value) for key, value in (numbers or {}).items() if isinstance(value, SupportsFloat)}
    return ToolResult(content, None if reward is None else float(reward), found)


def _entries(config: VerlToolsConfig) -> list[Mapping[str, Any]]:
    try:
        read = read_yaml(config.path, object)
    except DamagedFile as error:
        raise UserError(f"{_KEY}: {error}") from None
    entries = read.get("tools") if isinstance(read, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(f"{_KEY}: {config.path} has no list `tools` of {{class_name, config, tool_schema}}")
    return cast("list[Mapping[str, Any]]", entries)


def mcp_entries(config: VerlToolsConfig) -> list[Mapping[str, Any]]:
    """Those that stand for tools of MCP servers: `config: {type: mcp}`. Raises UserError as VerlTools does."""
    return [entry for entry in _entries(config) if _is_mcp(entry)]


def _is_mcp(entry: Mapping[str, Any]) -> bool:
    settings = entry.get("config")
    return isinstance(settings, Mapping) and settings.get("type") == "mcp"


def _schema_of(entry: Mapping[str, Any], config: VerlToolsConfig) -> ToolSchema:
    schema = entry.get("tool_schema")
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{_KEY}: {config.path}: {entry.get('class_name')!r} has no `tool_schema` of {{type: function, function: "
            "{name, description, parameters}}"
        )
    return cast("ToolSchema", schema)


def _make(entry: Mapping[str, Any], schema: ToolSchema, config: VerlToolsConfig) -> Any:
    """An object of the class that an entry names; it serves all trajectories."""
    place, _, name = str(entry.get("class_name")).rpartition(".")
    kind = load_named(f"{place}:{name}", f"{_KEY}: {config.path}:") if place else None
    if not callable(kind):
        raise UserError(
            f"{_KEY}: {config.path}: there is no class {entry.get('class_name')!r}; write package.module.Class"
        )
    settings = entry.get("config") or {}
    if not isinstance(settings, Mapping):
        raise UserError(f"{_KEY}: {config.path}: {name}: config: {settings!r:.100} is no section of keys and values")
    try:
        with exceptions_only():
            return kind(dict(settings), _Schema.model_validate(schema))
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{_KEY}: {config.path}: {name}: {type(error).__name__}: {error}") from error
