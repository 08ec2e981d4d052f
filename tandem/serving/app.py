"""Routes and authorization: the endpoint as an ASGI application, over any Answerer.

/health                        without the token: 200, or 503 after an answer failed inside, and no more
/v1/models, /v1/models/NAME
/v1/completions, /v1/chat/completions

With sessions besides: serving/capture.py.
"""

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
from tandem.serving.answer import RequestOutput
from tandem.serving.base import Answerer
from tandem.serving.capture import Capture
from tandem.serving.chat import ChatResponse, asked_of, refuse_long_messages
from tandem.serving.complaints import Complaints
from tandem.serving.errors import RequestError, Stopping, body_of, status_of
from tandem.serving.http import HANDLERS, Bodies, key_of, refused_key, same_key
from tandem.serving.limits import USUAL, ServerLimits
from tandem.serving.parameters import ChatParameters, CompletionParameters, parse
from tandem.serving.requests import check_model
from tandem.serving.sse import EventStream, while_connected


class Endpoint:
    """The routes of the published interface, to be mounted at a base URL of clients."""

    def __init__(self, answerer: Answerer, limits: ServerLimits, complaints: Complaints) -> None:
        self._answerer = answerer
        self._limits, self._complaints = limits, complaints
        self._bodies = Bodies(limits)
        self.stopping = False
        """Whether new requests are refused."""
        self.failing = False
        """Whether the last answer failed inside."""

    def routes(self) -> list[Route]:
        return [
            Route("/models", self._models, methods=["GET"]),
            Route("/models/{name:path}", self._model, methods=["GET"]),
            Route("/completions", self._completions, methods=["POST"]),
            Route("/chat/completions", self._chat, methods=["POST"]),
        ]

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "failing"}, status_code=503) if self.failing else JSONResponse({"status": "ok"})

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
        def make(body: bytes) -> tuple[RequestOutput, bool]:
            params = parse(CompletionParameters, body, self._limits.samples)
            return RequestOutput(self._answerer, params), params.stream

        return await self._answer(request, *await self._bodies.of(request, make))

    async def _chat(self, request: HttpRequest) -> Response:
        def make(body: bytes) -> tuple[ChatParameters, RequestOutput | None]:
            params = parse(ChatParameters, body, self._limits.samples)
            return params, None if params.tools else RequestOutput(self._answerer, params)

        params, answer = await self._bodies.of(request, make)
        if answer is None:
            return await self._chat_with_tools(params)
        return await self._answer(request, answer, params.stream)

    async def _chat_with_tools(self, params: ChatParameters) -> Response:
        """Answer in a session of its own, which nothing is recorded of."""
        if self.stopping:
            raise Stopping
        check_model(params, self._answerer)
        policy = self._answerer.policy()
        session = Session(policy, Rules(self._answerer.defaults), seed=random.getrandbits(63))
        asked = await asked_of(params, policy)
        await refuse_long_messages(asked, session)
        return ChatResponse(session, params, asked, on_left=session.close, on_failure=self._note)

    async def _answer(self, request: HttpRequest, answer: RequestOutput, stream: bool) -> Response:
        if self.stopping:
            raise Stopping
        if stream:
            return EventStream(self._watched_chunks(answer))
        return JSONResponse(await while_connected(request.receive, self._watched_whole(answer)))

    async def _watched_whole(self, answer: RequestOutput) -> dict[str, Any]:
        try:
            whole = await answer.whole()
        except TandemError as error:
            self._note(error)
            raise
        self.failing = False
        return whole

    async def _watched_chunks(self, answer: RequestOutput) -> AsyncGenerator[dict[str, Any]]:
        """Yields the chunks; a failure on the way is the last of them."""
        try:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TandemError as error:
            self._note(error)
            yield body_of(error)
        else:
            self.failing = False

    def _note(self, error: TandemError) -> None:
        if status_of(error) == 500:
            self.failing = True
            behind = self._complaints.note(type(error))
            if behind is not None:
                print(f"tandem serve: {error}{behind}", file=sys.stderr, flush=True)


class TokenGuard:
    """Lets requests with the token through: `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if same_key(key_of(scope), self._token) else refused_key("give the endpoint's token")
        await app(scope, receive, send)


def make_app(
    answerer: Answerer, token: str, capture: Capture | None = None, *, limits: ServerLimits = USUAL
) -> Starlette:
    """The application of one answerer; `app.state.endpoint` is its Endpoint. With `capture`, whose admin key is the
    token, what is asked in sessions is recorded."""
    endpoint = Endpoint(answerer, limits, Complaints())
    plain = Router(endpoint.routes())
    routes: list[BaseRoute] = [Route("/health", endpoint.health, methods=["GET"])]
    if capture is None:
        routes.append(Mount("/v1", app=TokenGuard(plain, token)))
    else:
        routes += capture.routes(otherwise=plain)
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.endpoint = endpoint
    return app
