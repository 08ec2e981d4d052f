"""Routes, authorization, bodies and event streams: the endpoint as an ASGI application, over any Answerer.

/health                        without the token: 200, or 503 after an answer failed inside
/v1/models, /v1/models/NAME
/v1/completions, /v1/chat/completions
"""

import asyncio
import hmac
import json
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import EngineError, TandemError
from tandem.serving.answer import Answer
from tandem.serving.base import Answerer
from tandem.serving.errors import RequestError, Stopping, body_of, status_of
from tandem.serving.parameters import AnyParameters, ChatParameters, CompletionParameters, parse

_LONGEST_BODY = 16 * 2**20
_LEFT = 499
"""The HTTP status of an answer to a client that left, which nobody reads."""
Result = TypeVar("Result")


class Endpoint:
    """The routes of the published interface, to be mounted at a base URL of clients."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer
        self.stopping = False
        """Whether new requests are refused."""
        self.failure: str | None = None
        """Why the last answer failed inside; None after one that did not."""

    def routes(self) -> list[Route]:
        return [
            Route("/models", self._models, methods=["GET"]),
            Route("/models/{name:path}", self._model, methods=["GET"]),
            Route("/completions", self._completions, methods=["POST"]),
            Route("/chat/completions", self._chat, methods=["POST"]),
        ]

    async def health(self, request: HttpRequest) -> Response:
        if self.failure is not None:
            return JSONResponse({"status": "failing", "reason": self.failure}, status_code=503)
        return JSONResponse({"status": "ok", "version": self._answerer.version})

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != self._answerer.name:
            raise RequestError(f"model: {name!r} does not exist", param="model", code="model_not_found", status=404)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._answerer.name, "object": "model", "created": 0, "owned_by": "tandem"}

    async def _completions(self, request: HttpRequest) -> Response:
        return await self._answer(request, parse(CompletionParameters, await _body_of(request)))

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, parse(ChatParameters, await _body_of(request)))

    async def _answer(self, request: HttpRequest, params: AnyParameters) -> Response:
        answer = await asyncio.to_thread(Answer, self._answerer, params)  # a long text takes the tokenizer seconds
        if self.stopping:
            raise Stopping
        if params.stream:
            return EventStream(self._watched_chunks(answer))
        return JSONResponse(await while_connected(request.receive, self._watched_whole(answer)))

    async def _watched_whole(self, answer: Answer) -> dict[str, Any]:
        try:
            whole = await answer.whole()
        except TandemError as error:
            self._note(error)
            raise
        self.failure = None
        return whole

    async def _watched_chunks(self, answer: Answer) -> AsyncGenerator[dict[str, Any]]:
        """Yields the chunks; a failure on the way is the last of them."""
        try:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TandemError as error:
            self._note(error)
            yield body_of(error)
        else:
            self.failure = None

    def _note(self, error: TandemError) -> None:
        if status_of(error) == 500:
            self.failure = str(error)
            print(f"tandem serve: {error}", file=sys.stderr, flush=True)


class EventStream(Response):
    """Objects as server-sent events, the last of them `[DONE]` unless one was an error."""

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._objects):
            try:
                await while_connected(receive, self._send(send))
            except (ClientDisconnect, OSError):
                return  # closing the objects ends what makes them

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        failed = False
        async for item in self._objects:
            failed = "error" in item
            await send(_event(json.dumps(item)))
        if not failed:
            await send(_event("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. When the client leaves before, `work` is cancelled and ClientDisconnect raised."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_until_left(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body_of(request: HttpRequest) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_BODY:
            raise RequestError(f"the body is longer than {_LONGEST_BODY} bytes", code="body_too_long", status=413)
    return bytes(body)


class TokenGuard:
    """Lets requests with the token through: `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.lstrip(b" "), self._token):
            await self._app(scope, receive, send)
            return
        error = RequestError("give the endpoint's token as the API key", code="invalid_api_key", status=401)
        await _error_response(error)(scope, receive, send)


def make_app(answerer: Answerer, token: str) -> Starlette:
    """The application of one answerer; `app.state.endpoint` is its Endpoint."""
    endpoint = Endpoint(answerer)
    app = Starlette(
        routes=[
            Route("/health", endpoint.health, methods=["GET"]),
            Mount("/v1", routes=endpoint.routes(), middleware=[Middleware(TokenGuard, token=token)]),
        ],
        exception_handlers={
            TandemError: _on_tandem_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_that_left,
            Exception: _on_fault,
        },
    )
    app.state.endpoint = endpoint
    return app


def _error_response(error: TandemError) -> Response:
    return JSONResponse(body_of(error), status_code=status_of(error))


async def _on_tandem_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return _error_response(error)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answers where there is no such route, or not for this method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _error_response(RequestError(message, code="unknown_url", status=error.status_code))


async def _on_client_that_left(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=_LEFT)


async def _on_fault(request: HttpRequest, error: Exception) -> Response:
    """Answers when our own code is at fault; the server prints the traceback."""
    return _error_response(EngineError(f"internal error: {type(error).__name__}"))
