"""Messages through shared memory: written once, mapped by every reader; large arrays are not copied again.

    Arena.write --place--> View.read --> value, whose large arrays lie at the place
    Arena.free <--places-- View.released, once nothing refers to them any more

Where a place is told is not said here. Places are used again: a mapped page costs nothing, a fresh one a fault.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Iterable
from itertools import accumulate
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

OUT_OF_BAND_BYTES = 1 << 14
"""Smaller arrays are part of the pickle: copied."""
_ALIGNMENT = 64
Place = tuple[tuple[int, int], ...]
"""Of a message: start and stop of the pickle, then of its buffers."""


class SharedFile:
    """An anonymous file in memory, gone with its last user; as an argument of a new process the same file there."""

    def __init__(self, duplicate: Any = None) -> None:
        self.descriptor: int = duplicate.detach() if duplicate else os.memfd_create("tandem")

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedFile, (DupFd(self.descriptor),)

    def __del__(self) -> None:
        os.close(self.descriptor)


class Arena:
    """The writing end of a file."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._used: dict[Place, int] = {}
        """How many readers each place has."""
        self._grow(1 << 20)

    def write(self, value: Any, readers: int = 1) -> Place:
        """Raises what pickling the value raises."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, 5, buffer_callback=lambda b: len(b.raw()) < OUT_OF_BAND_BYTES or buffers.append(b))
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        ends = list(accumulate((-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0))
        first = self._find(ends[-1])
        place = tuple((first + end, first + end + len(part)) for part, end in zip(parts, ends, strict=False))
        for part, (start, stop) in zip(parts, place, strict=True):
            self._memory[start:stop] = part
        self._used[place] = readers
        return place

    def free(self, places: Iterable[Place]) -> None:
        """One reader has let go of them."""
        for place in places:
            self._used[place] -= 1
            if not self._used[place]:
                del self._used[place]

    def _find(self, size: int) -> int:
        """The first gap that is large enough."""
        start = 0
        for place in sorted(self._used):
            if place[0][0] - start >= size:
                return start
            start = -(-place[-1][1] // _ALIGNMENT) * _ALIGNMENT
        if start + size > len(self._memory):
            self._grow(start + size)
        return start

    def _grow(self, size: int) -> None:
        os.ftruncate(self._file.descriptor, 1 << (size - 1).bit_length())
        self._memory = mmap.mmap(self._file.descriptor, 0)


class View:
    """A reading end. What is read may be kept for ever; arrays may be changed only with `writable`."""

    def __init__(self, file: SharedFile, writable: bool = False) -> None:
        self._file = file
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._bytes = np.empty(0, np.uint8)
        self._held: dict[Place, weakref.ref[Any]] = {}

    def read(self, place: Place) -> Any:
        begin, end = place[0][0], place[-1][1]
        if end > len(self._bytes):
            self._bytes = np.frombuffer(mmap.mmap(self._file.descriptor, 0, access=self._access), np.uint8)
        region = self._bytes[begin:end]
        self._held[place] = weakref.ref(region)  # lives as long as any array that is read from it
        view = memoryview(region)  # type: ignore[arg-type]
        data, *buffers = (view[start - begin : stop - begin] for start, stop in place)
        return pickle.loads(data, buffers=buffers)

    def released(self) -> list[Place]:
        """What nothing refers to any more, each told once."""
        gone = [place for place, region in self._held.items() if region() is None]
        for place in gone:
            del self._held[place]
        return gone
