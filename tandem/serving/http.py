"""Bodies, keys and refusals."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from tandem.errors import EngineError, TandemError
from tandem.serving.errors import RequestError, body_of, status_of
from tandem.serving.limits import DISCARDED_BODIES, ServerLimits

_LONG = 64 * 2**10
"""Bytes from which a body is long: reading and understanding it takes longer than others should wait for."""
_LONG_AT_ONCE = 2
_BODIES_HELD = 16
"""So many bodies of the greatest length are in memory at once, or more that are shorter."""
_LEFT = 499
"""The HTTP status of an answer to a client that left, which nobody reads."""
Made = TypeVar("Made")


class Bodies:
    """The bodies of a server's requests: none longer than the limit, long ones only as far as there is memory.

    What is made of them is made in threads, while others are answered; of few long ones at once, so that there is
    always a thread for short ones.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._most = limits.body_bytes
        self._held = 0
        """Bytes of long ones that are in memory now."""
        self._places = asyncio.Semaphore(_LONG_AT_ONCE)

    async def of(self, request: HttpRequest, make: Callable[[bytes], Made], *, quick: bool = False) -> Made:
        """What `make` returns for the body, from a thread, unless that is short and `make` is `quick` then.

        Raises RequestError where the body is too long, or there are too many long ones.
        """
        body = bytearray()
        counted = 0
        try:
            async for part in self._parts(request):
                body += part
                if len(body) > _LONG:
                    self._held, counted = self._held + len(body) - counted, len(body)
                    self._check_held()
            if quick and not counted:
                return make(bytes(body))
            async with self._places if counted else nullcontext():
                return await asyncio.to_thread(lambda: make(bytes(body)))
        finally:
            self._held -= counted

    async def _parts(self, request: HttpRequest) -> AsyncGenerator[bytes]:
        """A body that is too long is let in for a while, and dropped: many clients read no answer before they have sent
        all."""
        declared, came = request.headers.get("content-length", ""), 0
        too_long = declared.isdecimal() and int(declared) > self._most
        async for part in request.stream():
            came += len(part)
            too_long = too_long or came > self._most
            if came > DISCARDED_BODIES * self._most:
                break
            if not too_long:
                yield part
        if too_long:
            message = f"the body is longer than {self._most} bytes, which is the most that this server takes"
            raise RequestError(message, code="body_too_long", status=413)

    def _check_held(self) -> None:
        if self._held > _BODIES_HELD * self._most:
            message = "the server has as many long requests as it may hold; send the request again in a while"
            raise RequestError(message, code="overloaded", status=503)


def header(scope: Scope, name: bytes) -> str:
    """The first header of that name; empty where there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def key_of(scope: Scope) -> str:
    """What a request is authorised with, `Authorization: Bearer KEY`; empty where it is not."""
    scheme, _, key = header(scope, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def same_key(given: str, key: str) -> bool:
    """Takes as long whatever they differ in."""
    return hmac.compare_digest(given.encode(), key.encode())


def refused_key(mend: str) -> Response:
    return error_response(RequestError(f"{mend} as the API key", code="invalid_api_key", status=401))


def error_response(error: TandemError) -> Response:
    return JSONResponse(body_of(error), status_code=status_of(error))


async def _on_tandem_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answers where there is no such route, or not for this method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(RequestError(message, code="unknown_url", status=error.status_code))


async def _on_client_that_left(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=_LEFT)


async def _on_fault(request: HttpRequest, error: Exception) -> Response:
    """Answers when our own code is at fault; the server prints the traceback."""
    return error_response(EngineError(f"internal error: {type(error).__name__}"))


HANDLERS: dict[Any, Any] = {
    TandemError: _on_tandem_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_client_that_left,
    Exception: _on_fault,
}
"""What answers where a request raised."""
