"""What a server writes about its clients: the same complaint a few times a minute, whatever they do."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_A_MINUTE = 5
"""So many of the same complaint are written a minute."""
_ALL_A_MINUTE = 100
"""And of all together."""
_KINDS = 256
"""So many kinds are told apart; then those that came up longest ago are forgotten."""
_LIKE = 40
"""Letters in which messages agree that are of one kind."""
_OF_CLIENTS = ("uvicorn", "asyncio", "mcp", "tandem")
"""Loggers on which clients have an influence."""


@dataclass(slots=True)
class _Minute:
    begun: float
    most: int
    written: int = 0
    left_out: int = 0

    def count(self, now: float) -> str | None:
        """What is to be written behind one more; None: it is one too many."""
        told = ""
        if now - self.begun >= 60:
            told = f" ({self.left_out:,} more of these were left out)" if self.left_out else ""
            self.begun, self.written, self.left_out = now, 0, 0
        if self.written >= self.most:
            self.left_out += 1
            return None
        self.written += 1
        return told + (" (further ones of this minute are left out)" if self.written == self.most else "")


class Complaints:
    """Counts complaints by their kind, and all together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: OrderedDict[Hashable, _Minute] = OrderedDict()
        self._all = _Minute(clock(), _ALL_A_MINUTE)

    def note(self, kind: Hashable) -> str | None:
        """What is to be written behind the complaint; None: the complaint is to be left out."""
        now = self._clock()
        own = self._kinds.setdefault(kind, _Minute(now, _A_MINUTE))
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        told = own.count(now)
        return None if told is None or self._all.count(now) is None else told


class LogFilter(logging.Filter):
    """Lets records of clients' doing through as `Complaints` has it, and all others as they are."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__()
        self._complaints = complaints

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in _OF_CLIENTS:
            return True
        behind = self._complaints.note((record.name, record.levelno, str(record.msg)[:_LIKE], _kind_of(record)))
        if behind:
            record.msg, record.args = record.getMessage() + behind, ()
        return behind is not None


def _kind_of(record: logging.LogRecord) -> Hashable:
    """Of the exception: what it is and where it was raised."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error), trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


@contextmanager
def seldom_repeated(complaints: Complaints) -> Iterator[None]:
    """Meanwhile what is logged of clients' doing is limited, wherever it is written."""
    own = LogFilter(complaints)
    handlers = logging.getLogger().handlers or [handler for handler in (logging.lastResort,) if handler is not None]
    for handler in handlers:
        handler.addFilter(own)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(own)
