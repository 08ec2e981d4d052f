"""An event loop whose clock stands still while it does not run."""

import asyncio
import time
from typing import Any


class PausingEventLoop(asyncio.SelectorEventLoop):
    """Tasks in it outlive `run_until_complete`, and no time passes for them between two calls.

    Else a call of a tool that was answered while a process trained its model would be taken for one that was not
    answered in time: its time-out would be due before the loop can read the answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stood_still_s = 0.0
        self._stopped_at: float | None = time.monotonic()
        """None: it runs."""

    def time(self) -> float:
        """Seconds of running; monotonic."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stood_still_s

    def run_until_complete(self, future: Any) -> Any:
        """Also where another loop runs that has called us, as that of a notebook does: it waits."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # for implementers of event loops, says its documentation
        try:
            return super().run_until_complete(future)
        finally:
            asyncio._set_running_loop(outer)

    def run_forever(self) -> None:
        if self._stopped_at is not None:
            self._stood_still_s += time.monotonic() - self._stopped_at
        self._stopped_at = None
        try:
            super().run_forever()
        finally:
            self._stopped_at = time.monotonic()
