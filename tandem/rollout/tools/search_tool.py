"""Search as a tool, in this process: an index, without a server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.rollout.environment import ToolSchema
from tandem.rollout.threads import in_thread
from tandem.rollout.tools.base import CallLimits, ToolError, ToolResult, ToolSession
from tandem.rollout.tools.builtin.search import SearchToolsConfig
from tandem.search.index import Index, open_index, shown
from tandem.types import Prompt


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")

    query: str
    k: int | None = Field(None, ge=1)


class SearchTools:
    """One tool over one index: a ToolSet."""

    def __init__(self, config: SearchToolsConfig, limits: CallLimits) -> None:
        """Raises UserError where there is no index."""
        if not (config.index / "index.json").is_file():
            open_index(config.index)  # which says what is wrong
        self._config = config
        self._limits = limits
        self._slots = asyncio.Semaphore(config.calls_at_once)
        self._index: Index | None = None

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        config = self._config
        properties = {"query": {"type": "string", "description": "What to look for."}}
        if config.most_passages > 1:
            how_many = f"How many passages, at most {config.most_passages}; {config.passages} unless given."
            properties["k"] = {"type": "integer", "description": how_many}
        parameters = {"type": "object", "properties": properties, "required": ["query"]}
        function = {"name": config.name, "description": config.description, "parameters": parameters}
        return [{"type": "function", "function": function}]

    async def open(self) -> None:
        self._index = await in_thread(open_index, self._config.index)

    def session(self, prompt: Prompt) -> ToolSession:
        return _SearchSession(self)

    async def close(self) -> None:
        self._index = None

    async def search(self, arguments: Mapping[str, Any]) -> ToolResult:
        """As ToolSession.call."""
        assert self._index is not None, "the tools are not open"
        try:
            given = _Arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ToolError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
        k = min(given.k or self._config.passages, self._config.most_passages)
        async with self._slots, self._limits.sent():
            return ToolResult(shown(await in_thread(self._index.search, given.query, k)))


class _SearchSession:
    """Search remembers nothing."""

    def __init__(self, tools: SearchTools) -> None:
        self._tools = tools

    async def start(self) -> str | None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._tools.search(arguments)

    async def close(self) -> float | None:
        return None
