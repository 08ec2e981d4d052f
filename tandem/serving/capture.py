"""The endpoint that records: each session is a key, under which an agent program asks, and one trajectory.

agent     POST /v1/chat/completions, GET /v1/models      Authorization: Bearer SESSION
          /s/SESSION/v1/…                                 for programs that know only a base URL
          X-Session-ID: NAME beside the admin key         for programs that name their sessions, by their first call
          POST /sessions/SESSION/reward                   its own word, with the session's key or the admin key
trainer   POST /sessions, GET /sessions/SESSION/samples, DELETE /sessions/SESSION      Authorization: Bearer ADMIN
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.rollout.session import Session
from tandem.serving.chat import ChatResponse, asked_of, refuse_long_messages
from tandem.serving.errors import RequestError
from tandem.serving.http import HANDLERS, Bodies, header, key_of, refused_key, same_key
from tandem.serving.limits import USUAL, ServerLimits
from tandem.serving.parameters import ChatParameters, parse
from tandem.serving.sessions import Sessions
from tandem.types import Branch

_LONGEST_NAME = 256


class Capture:
    """Answers in sessions, and tells the trainer what they recorded."""

    def __init__(
        self, sessions: Sessions, admin_key: str, make: Callable[[], Session], name: str, limits: ServerLimits = USUAL
    ) -> None:
        """`make`: a fresh session; `name`: of the model, though sessions take any."""
        self._sessions = sessions
        self._admin_key = admin_key
        self._make = make
        self._name = name
        self._limits, self._bodies = limits, Bodies(limits)

    def routes(self, otherwise: ASGIApp) -> list[BaseRoute]:
        """`otherwise`: what answers below /v1 where the admin key is given and no session is named."""
        agent = Router(
            [
                Route("/chat/completions", self._chat, methods=["POST"]),
                Route("/models", self._models, methods=["GET"]),
                Route("/models/{name:path}", self._model, methods=["GET"]),
            ]
        )
        return [
            Route("/sessions", self._begin, methods=["POST"]),
            Route("/sessions/{key}/samples", self._samples, methods=["GET"]),
            Route("/sessions/{key}/reward", self._reward, methods=["POST"]),
            Route("/sessions/{key}", self._end, methods=["DELETE"]),
            Mount("/s/{key}/v1", app=_InSession(agent, self._by_path)),
            Mount("/v1", app=_InSession(agent, self._by_header, otherwise)),
        ]

    def _is_admin(self, scope: Scope) -> bool:
        return same_key(key_of(scope), self._admin_key)

    def _by_path(self, scope: Scope) -> Session | None:
        find = self._sessions.find if self._is_admin(scope) else self._sessions.find_by_secret
        return find(scope["path_params"]["key"])

    def _by_header(self, scope: Scope) -> Session | None:
        """Raises PermissionError where the key is of no session."""
        name = header(scope, b"x-session-id")[:_LONGEST_NAME]
        if not self._is_admin(scope):
            session = self._sessions.find_by_secret(key_of(scope))
            if session is None:
                raise PermissionError
            return session
        if name and self._sessions.find(name) is None:
            self._sessions.begin(self._make(), name)
        return self._sessions.find(name)

    async def _chat(self, request: HttpRequest) -> Response:
        session: Session = request.scope["session"]
        samples = self._limits.samples
        params = await self._bodies.of(request, lambda body: parse(ChatParameters, body, samples), quick=True)
        retries = request.headers.get("x-stainless-retry-count", "0")
        asked = await asked_of(params, session.policy)
        await refuse_long_messages(asked, session)
        return ChatResponse(session, params, asked, retried=retries.isdecimal() and int(retries) > 0)

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(self._name)]})

    async def _model(self, request: HttpRequest) -> Response:
        return JSONResponse(self._described(request.path_params["name"]))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "tandem"}

    async def _begin(self, request: HttpRequest) -> Response:
        if not self._is_admin(request.scope):
            return refused_key("give the endpoint's token")
        return JSONResponse({"key": self._sessions.begin(self._make())})

    async def _samples(self, request: HttpRequest) -> Response:
        if not self._is_admin(request.scope):
            return refused_key("give the endpoint's token")
        return JSONResponse(told(self._named(request)))

    async def _reward(self, request: HttpRequest) -> Response:
        given, key = key_of(request.scope), request.path_params["key"]
        is_its_own = same_key(given, key) and self._sessions.find_by_secret(key) is not None
        if not self._is_admin(request.scope) and not is_its_own:
            return refused_key("give the session's key, or the endpoint's token,")
        session = self._named(request)
        session.reward = await self._bodies.of(request, _reward_in, quick=True)
        return JSONResponse({"reward": session.reward})

    async def _end(self, request: HttpRequest) -> Response:
        if not self._is_admin(request.scope):
            return refused_key("give the endpoint's token")
        session = self._named(request)
        self._sessions.end(request.path_params["key"])
        return JSONResponse({"calls": session.asked})

    def _named(self, request: HttpRequest) -> Session:
        session = self._sessions.find(request.path_params["key"])
        if session is None:
            raise RequestError("there is no such session", code="unknown_session", status=404)
        return session


def capture_app(capture: Capture) -> Starlette:
    """The application that answers in sessions alone."""
    nobody = refused_key("give a session's key")
    return Starlette(routes=capture.routes(otherwise=nobody), exception_handlers=HANDLERS)


class _InSession:
    """Lets requests through that belong to a session, which they find in their scope."""

    def __init__(self, app: ASGIApp, find: Callable[[Scope], Session | None], otherwise: ASGIApp | None = None) -> None:
        self._app = app
        self._find = find
        self._otherwise = otherwise or refused_key("give a session's key in the path or")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = self._find(scope)
        except PermissionError:
            await refused_key("there is no such session: give a session's key")(scope, receive, send)
            return
        if session is None:
            await self._otherwise(scope, receive, send)
            return
        await self._app({**scope, "session": session}, receive, send)


def _reward_in(body: bytes) -> float:
    """A JSON number, or {"reward": number}."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    value = given.get("reward") if isinstance(given, dict) else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RequestError('give {"reward": NUMBER}', param="reward", code="invalid_value")
    return float(value)


def told(session: Session) -> dict[str, Any]:
    """What a session has recorded so far."""
    return {
        "status": "truncated" if session.truncated else "completed",
        "closed": session.closed,
        "reward": session.reward,
        "calls": session.asked,
        "messages": session.messages(),
        "samples": [_sample(branch) for branch in session.branches()],
    }


def _sample(branch: Branch) -> dict[str, Any]:
    return {
        "prompt_ids": branch.prompt_ids.tolist(),
        "response_ids": branch.response_ids.tolist(),
        "loss_mask": branch.loss_mask.tolist(),
        "logprobs": branch.rollout_logprobs.tolist(),
        "versions": branch.versions.tolist(),
        "turns": [{"author": turn.author, "tokens": turn.tokens, "text": turn.text} for turn in branch.turns],
        "pictures": [
            {"key": one.key, "rows": one.grid[0], "columns": one.grid[1], "place": one.place} for one in branch.pictures
        ],
    }
