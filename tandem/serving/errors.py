"""What a client is told instead of an answer, in the shape that OpenAI publishes."""

from typing import Any

from tandem.errors import TandemError, UserError
from tandem.rollout.session import ContextLengthExceeded, CutShort, SessionClosed

_MOST_LETTERS = 4000
"""Of a message."""


class RequestError(UserError):
    """A request that is refused: the client's mistake."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        """`param`: the parameter at fault; `code`: what programs may branch on; `status`: of HTTP."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Stopping(TandemError):
    """The server is going away, with it answers that are not complete."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


def status_of(error: TandemError) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, SessionClosed):
        return 403
    if isinstance(error, Stopping | CutShort):
        return 503
    return 400 if isinstance(error, UserError) else 500


def body_of(error: TandemError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    if isinstance(error, RequestError):
        kind, param, code = "invalid_request_error", error.param, error.code
    elif isinstance(error, ContextLengthExceeded):
        kind, param, code = "invalid_request_error", "messages", "context_length_exceeded"
    elif isinstance(error, SessionClosed):
        kind, param, code = "invalid_request_error", None, "session_closed"
    elif isinstance(error, UserError):  # an engine's or a chat template's: what it cannot serve
        kind, param, code = "invalid_request_error", None, "invalid_value"
    elif isinstance(error, Stopping | CutShort):
        kind, param, code = "server_error", None, "stopping"
    else:
        kind, param, code = "server_error", None, "engine_error"
    return {"error": {"message": _told(error), "type": kind, "param": param, "code": code}}


def _told(error: TandemError) -> str:
    """The message, which may repeat what the client has sent, and be as long."""
    message = str(error)
    return message if len(message) <= _MOST_LETTERS else f"{message[:_MOST_LETTERS]}…"
