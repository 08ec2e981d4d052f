"""Routes and authorization: the endpoint as an ASGI application, over any Answerer.

/health                        without the token: 200, or 503 after an answer failed inside
/v1/models, /v1/models/NAME
/v1/completions, /v1/chat/completions

With sessions besides: serving/capture.py.
"""

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import TandemError
from tandem.rollout.session import Rules, Session
from tandem.serving.answer import Answer
from tandem.serving.base import Answerer
from tandem.serving.capture import Capture
from tandem.serving.chat import ChatResponse, asked_of
from tandem.serving.errors import RequestError, Stopping, body_of, status_of
from tandem.serving.events import EventStream, while_connected
from tandem.serving.http import HANDLERS, key_of, read_body, refused_key, same_key
from tandem.serving.parameters import AnyParameters, ChatParameters, CompletionParameters, parse
from tandem.serving.requests import check_model


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
        return await self._answer(request, parse(CompletionParameters, await read_body(request)))

    async def _chat(self, request: HttpRequest) -> Response:
        params = parse(ChatParameters, await read_body(request))
        return await (self._chat_with_tools(params) if params.tools else self._answer(request, params))

    async def _chat_with_tools(self, params: ChatParameters) -> Response:
        """Answer in a session of its own, which nothing is recorded of."""
        if self.stopping:
            raise Stopping
        check_model(params, self._answerer)
        policy = self._answerer.policy()
        session = Session(policy, Rules(self._answerer.defaults), seed=random.getrandbits(63))
        asked = await asked_of(params, policy)
        return ChatResponse(session, params, asked, on_left=session.close, on_failure=self._note)

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


class TokenGuard:
    """Lets requests with the token through: `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if same_key(key_of(scope), self._token) else refused_key("give the endpoint's token")
        await app(scope, receive, send)


def make_app(answerer: Answerer, token: str, capture: Capture | None = None) -> Starlette:
    """The application of one answerer; `app.state.endpoint` is its Endpoint. With `capture`, whose admin key is the
    token, what is asked in sessions is recorded."""
    endpoint = Endpoint(answerer)
    plain = Router(endpoint.routes())
    routes: list[BaseRoute] = [Route("/health", endpoint.health, methods=["GET"])]
    if capture is None:
        routes.append(Mount("/v1", app=TokenGuard(plain, token)))
    else:
        routes += capture.routes(otherwise=plain)
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.endpoint = endpoint
    return app
