"""The sessions of an endpoint, by their keys."""

import asyncio
import secrets
from dataclasses import dataclass

from tandem.rollout.session import Session
from tandem.serving.errors import RequestError


@dataclass(frozen=True, slots=True)
class _Open:
    session: Session
    limit: asyncio.TimerHandle
    is_secret: bool
    """Its key was drawn here; a name that was given to it, others may guess."""


class Sessions:
    """Each is closed after a limit, though nobody ends it, and kept until it is ended. All calls come from the event
    loop that the endpoint runs in."""

    def __init__(self, limit_s: float, most: int = 4096) -> None:
        """`limit_s`: how long a session lasts, in seconds of the event loop; `most`: how many are kept."""
        self._limit_s = limit_s
        self._most = most
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, session: Session, key: str | None = None) -> str:
        """Returns its key: a new one, or the given one. Raises RequestError where there are too many sessions, none of
        which is closed."""
        if len(self._open) >= self._most:
            self._forget_the_oldest()
        limit = asyncio.get_running_loop().call_later(self._limit_s, session.close)
        drawn = secrets.token_urlsafe(24)
        self._open[key or drawn] = _Open(session, limit, is_secret=not key)
        return key or drawn

    def find(self, key: str) -> Session | None:
        """For who may see every session."""
        found = self._open.get(key)
        return None if found is None else found.session

    def find_by_secret(self, key: str) -> Session | None:
        """For who is let in by the key alone."""
        found = self._open.get(key)
        return None if found is None or not found.is_secret else found.session

    def end(self, key: str) -> Session | None:
        """Close it, and forget it; None where there is none."""
        ended = self._open.pop(key, None)
        if ended is None:
            return None
        ended.limit.cancel()
        ended.session.close()
        return ended.session

    def close(self) -> None:
        for key in list(self._open):
            self.end(key)

    def _forget_the_oldest(self) -> None:
        """Of those that are closed."""
        closed = next((key for key, kept in self._open.items() if kept.session.closed), None)
        if closed is None:
            raise RequestError(
                f"{self._most} sessions are open, which is the most there may be; end some", code="too_many", status=429
            )
        self.end(closed)
