"""Whose samples the engine gets next, of many requests at once.

    take(owner, samples, outputs) --turn--> the engine --samples that end--> the next turn

The engine has as many samples as it can work on, and a few more; the others wait here. The next turn is that of the
request with the fewest samples in the engine, of several the one that has waited longest: a request of one prompt does
not wait for all prompts of another one that came before. A part of the room is kept for requests with few samples in
the engine: those of others may be long, and none is taken back once it has begun.

consumes:     requests to the engine, each of an owner
produces:     what the engine answers
waits for:    room in the engine
unblocked by: each sample that ends, also those of clients that left; `stop`
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from tandem.serving.errors import Stopping
from tandem.types import Completion, Delta

Output = TypeVar("Output", Completion, Delta)
_FEW = 16
"""A request with at most 1 / this of the room has few samples in the engine."""
_KEPT = 4
"""1 / this of the room is kept for those."""


@dataclass(eq=False, slots=True)
class _Turn:
    owner: object
    samples: int
    """Of those that it was given for, how many have not ended."""
    came: asyncio.Future[None]
    is_large: bool = False
    """Its owner had more than a few samples in the engine with it."""


class FairOrder:
    """The turns of one engine. All calls come from its event loop."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room`: how many samples the engine should have."""
        self._room = room
        self._running: dict[object, int] = {}
        """Samples in the engine, by owner."""
        self._in_engine, self._large = 0, 0
        """Samples in the engine, and those of large turns among them."""
        self._waiting: dict[object, deque[_Turn]] = {}
        """By owner, in each who came first first."""
        self._stopped = False

    async def take(self, owner: object, samples: int, outputs: AsyncIterator[Output]) -> AsyncGenerator[Output]:
        """Yields what the engine answers in `outputs`, a request of so many samples, from the owner's turn on. Raises
        Stopping where that does not come any more."""
        turn = _Turn(owner, samples, asyncio.get_running_loop().create_future())
        try:
            await self._wait(turn)
            async for output in outputs:
                if output.status is not None:
                    self._leave(turn, 1)
                yield output
        finally:
            if not turn.came.cancel() and not turn.came.cancelled():
                self._leave(turn, turn.samples)

    def stop(self) -> None:
        """Give no more turns."""
        self._stopped = True
        for turns in self._waiting.values():
            for turn in turns:
                turn.came.cancel()
        self._waiting.clear()

    async def _wait(self, turn: _Turn) -> None:
        if self._stopped:
            turn.came.cancel()
            raise Stopping
        self._waiting.setdefault(turn.owner, deque()).append(turn)
        self._give()
        await asyncio.wait([turn.came])
        if turn.came.cancelled():
            raise Stopping

    def _give(self) -> None:
        """Give turns while there is room. One may have more samples than there is room for."""
        while (turn := self._next()) is not None:
            waiting = self._waiting[turn.owner]
            waiting.popleft()
            if not waiting:
                del self._waiting[turn.owner]
            if turn.came.cancelled():  # nobody waits for it any more
                continue
            self._in_engine += turn.samples
            self._large += turn.samples * turn.is_large
            self._running[turn.owner] = self._running.get(turn.owner, 0) + turn.samples
            turn.came.set_result(None)

    def _next(self) -> _Turn | None:
        """The turn of the owner with the fewest samples in the engine, of those for whom there is room."""
        room = self._room()
        for owner in sorted(self._waiting, key=lambda one: self._running.get(one, 0)):
            turn = self._waiting[owner][0]
            turn.is_large = self._running.get(owner, 0) + turn.samples > max(1, room // _FEW)
            if turn.came.cancelled() or self._has_room(turn, room):
                return turn
        return None

    def _has_room(self, turn: _Turn, room: int) -> bool:
        if not turn.is_large:
            return self._in_engine < room
        return self._large == 0 or self._in_engine + turn.samples <= room - room // _KEPT

    def _leave(self, turn: _Turn, samples: int) -> None:
        if samples == 0:
            return
        turn.samples -= samples
        self._in_engine -= samples
        self._large -= samples * turn.is_large
        self._running[turn.owner] -= samples
        if self._running[turn.owner] == 0:
            del self._running[turn.owner]
        self._give()
