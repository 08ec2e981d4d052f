"""What `watch` of every cluster has in common: calls under way, callbacks of those that are answered, and sources.

watch --answer of a rank--> PendingCall --all ranks have answered--> due --run--> callbacks, then EventSource.poll
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tandem.controller.worker_groups import EventSource, Future

_LOOK_S = 1.0
"""A moment: the longest that `watch` waits, so that time-outs and deaths are seen."""


class PendingCall:
    """A call of some ranks under way: their answers, in the order in which they were called, None until they come."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.answers: dict[int, Any] = dict.fromkeys(ranks)
        self.missing = len(self.answers)
        self.callbacks: list[Callable[[], None]] = []


class Events:
    """The callbacks that are due, in the order in which their calls were answered, and the sources of a cluster."""

    def __init__(self) -> None:
        self.sources: list[EventSource] = []
        self._due: deque[Callable[[], None]] = deque()
        self._running = False

    def future(self, call: PendingCall, wait: Callable[[], dict[int, Any]]) -> Future[dict[int, Any]]:
        return Future(wait, partial(self._notify, call))

    def _notify(self, call: PendingCall, callback: Callable[[], None]) -> None:
        (call.callbacks if call.missing else self._due).append(callback)

    def answered(self, call: PendingCall, rank: int, answer: Any) -> None:
        """Take in a rank's answer."""
        call.answers[rank] = answer
        call.missing -= 1
        if not call.missing:
            self._due += call.callbacks
            call.callbacks.clear()

    def connections(self) -> list[Any]:
        """Those of all sources."""
        return [connection for source in self.sources for connection in source.connections()]

    def patience_s(self, timeout_s: float | None, under_way: bool) -> float:
        """How long `watch` may wait: not at all where a callback is due, or nothing is under way."""
        assert not self._running, "a callback or a source's poll waits: it may only submit"
        if self._due or not under_way:
            return 0.0
        return _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s)

    def forget(self) -> None:
        """The processes have ended: callbacks of their answers would act on what is gone."""
        self._due.clear()

    def run(self) -> None:
        """Run the callbacks that are due, but not those that become due meanwhile; then poll each source."""
        self._running = True
        try:
            for _ in range(len(self._due)):
                self._due.popleft()()
            for source in list(self.sources):
                source.poll()
        finally:
            self._running = False
