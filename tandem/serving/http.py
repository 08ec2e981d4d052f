"""Bodies, keys and refusals."""

import hmac
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from tandem.errors import EngineError, TandemError
from tandem.serving.errors import RequestError, body_of, status_of

_LONGEST_BODY = 16 * 2**20
_LEFT = 499
"""The HTTP status of an answer to a client that left, which nobody reads."""


async def read_body(request: HttpRequest) -> bytes:
    """Raises RequestError where it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_BODY:
            raise RequestError(f"the body is longer than {_LONGEST_BODY} bytes", code="body_too_long", status=413)
    return bytes(body)


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
