"""An index as a server: an MCP tool `search`, and the same over plain HTTP.

/health                                                     without the token
/mcp                                                        streamable HTTP
POST /search    {query, k}                               -> {results: [{id, title, text, score}]}
POST /retrieve  {queries: [...], topk, return_scores}    -> {result: [[{document: {id, contents}, score}]]}, what the
                                                            retrieval server of Search-R1 and verl's search tool speak
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, TypeVar

from mcp.server import MCPServer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tandem.search.index import Hit, Index, shown
from tandem.serving.app import TokenGuard
from tandem.serving.errors import RequestError
from tandem.serving.http import HANDLERS, Bodies
from tandem.serving.limits import ServerLimits
from tandem.serving.server import Server

_MOST_HITS = 100
_MOST_PASSAGES = 10_000
"""That one request to /retrieve may ask for: its queries times `topk`."""
_REQUESTS_AT_ONCE = 2
"""To /retrieve, so that a thread is free for those to /search."""
_AT_ONCE = 4
"""Queries of a request that are answered before others have their turn."""


class _Query(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    query: str
    k: int = Field(3, ge=1, le=_MOST_HITS)


class _Queries(BaseModel):
    model_config = ConfigDict(strict=True)

    queries: list[str] = Field(max_length=1000)
    topk: int | None = Field(None, ge=1, le=_MOST_HITS)
    return_scores: bool = False


Body = TypeVar("Body", bound=BaseModel)


class SearchEndpoint:
    """The routes of plain HTTP."""

    def __init__(self, index: Index, limits: ServerLimits) -> None:
        self._index = index
        self._bodies = Bodies(limits)
        self._places = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    def routes(self) -> list[Route]:
        return [Route("/search", self._search, methods=["POST"]), Route("/retrieve", self._retrieve, methods=["POST"])]

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _search(self, request: HttpRequest) -> Response:
        given = await self._bodies.of(request, partial(_read, _Query), quick=True)
        hits = await asyncio.to_thread(self._index.search, given.query, given.k)
        return JSONResponse({"results": [_described(hit) for hit in hits]})

    async def _retrieve(self, request: HttpRequest) -> Response:
        given = await self._bodies.of(request, partial(_read, _Queries), quick=True)
        k = given.topk or 3
        if len(given.queries) * k > _MOST_PASSAGES:
            raise RequestError(
                f"queries: {len(given.queries):,} of them with topk {k} ask for more than {_MOST_PASSAGES:,} passages, "
                "which is the most of one request; send several requests",
                param="queries",
                code="invalid_value",
            )
        pieces = self._found(given.queries, k, given.return_scores)
        return StreamingResponse(pieces, media_type="application/json")

    async def _found(self, queries: Sequence[str], k: int, with_scores: bool) -> AsyncGenerator[str]:
        """The answer in pieces of a few queries, each looked for when the client has taken those before: other requests
        are answered between them, and who reads nothing takes no memory."""
        yield '{"result": ['
        for start in range(0, len(queries), _AT_ONCE):
            some = queries[start : start + _AT_ONCE]
            async with self._places:
                found = await asyncio.to_thread(lambda some=some: [self._index.search(query, k) for query in some])
            told = (json.dumps([_document(hit, with_scores) for hit in hits]) for hits in found)
            yield (", " if start else "") + ", ".join(told)
        yield "]}"


def make_mcp_server(index: Index) -> MCPServer:
    """With one tool, `search`."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")  # else mcp takes one that opens files
    server = MCPServer("search", log_level="WARNING")

    @server.tool(structured_output=False)
    def search(query: str, k: int = 3) -> str:
        """Find passages that fit a query.

        Args:
            query: What to look for.
            k: How many passages, 3 unless given.
        """
        return shown(index.search(query, max(1, min(k, _MOST_HITS))))

    return server


async def run_search_server(index: Index, reserved: socket.socket, token: str, limits: ServerLimits) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    mcp, endpoint = make_mcp_server(index), SearchEndpoint(index, limits)
    mcp_app = mcp.streamable_http_app(host=reserved.getsockname()[0], json_response=True, stateless_http=True)
    inner = Starlette(routes=[*endpoint.routes(), *mcp_app.routes], exception_handlers=HANDLERS)
    app = Starlette(routes=[Route("/health", endpoint.health), Mount("/", TokenGuard(inner, token))])

    def on_start(url: str) -> None:
        root = url.removesuffix("/v1")
        print(f"{root}/search  {root}/mcp  {len(index)} passages", flush=True)

    async with mcp.session_manager.run():
        await Server(app, reserved, limits=limits, on_start=on_start).run_until_stopped()


def _read(kind: type[Body], body: bytes) -> Body:
    """Raises RequestError."""
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", param=place, code="invalid_value") from None
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON", code="invalid_json") from None


def _described(hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": hit.score}


def _document(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": f'"{hit.passage.title}"\n{hit.passage.text}'}
    return {"document": document, "score": hit.score} if with_score else document
