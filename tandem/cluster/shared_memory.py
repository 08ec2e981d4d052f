"""Messages through shared memory: written once, mapped by every reader; large arrays are not copied again.

    Arena.write --slot--> View.read --> value, whose large arrays lie in the slot
    Arena.free <--slots-- View.released, once nothing refers to them any more

How slots reach the other side is its users' affair. Slots are used again: a mapped page costs nothing, a fresh one a
fault.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

OUT_OF_BAND_BYTES = 1 << 14
"""Smaller arrays are part of the pickle: copied."""
_ALIGNMENT = 64
Slot = tuple[tuple[int, int], ...]
"""Where a message lies: start and stop of the pickle, then of each of its buffers."""


class SharedFile:
    """An anonymous file in memory, gone with its last user; as an argument of a new process the same file there."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of a file that is there already, to close with this; default: a new file."""
        self.descriptor = os.memfd_create("tandem") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _duplicated, (DupFd(self.descriptor),)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _duplicated(duplicate: Any) -> SharedFile:
    return SharedFile(duplicate.detach())


class Arena:
    """The writing end of a file."""

    def __init__(self, file: SharedFile, dumps: Callable[..., bytes] = pickle.dumps) -> None:
        """`dumps` pickles: it takes a value, a protocol and a `buffer_callback`."""
        self._file = file
        self._dumps = dumps
        self._used: dict[Slot, int] = {}
        """How many readers each slot has."""
        self._grow(1 << 20)

    def write(self, value: Any, readers: int = 1) -> Slot:
        """Raises what pickling the value raises."""
        buffers: list[pickle.PickleBuffer] = []
        data = self._dumps(value, 5, buffer_callback=lambda b: len(b.raw()) < OUT_OF_BAND_BYTES or buffers.append(b))
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        ends = list(accumulate((-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0))
        first = self._find(ends[-1])
        slot = tuple((first + end, first + end + len(part)) for part, end in zip(parts, ends, strict=False))
        for part, (start, stop) in zip(parts, slot, strict=True):
            self._memory[start:stop] = part
        self._used[slot] = readers
        return slot

    def free(self, slots: Iterable[Slot]) -> None:
        """One reader has let go of them."""
        for slot in slots:
            self._used[slot] -= 1
            if not self._used[slot]:
                del self._used[slot]

    def _find(self, size: int) -> int:
        """The first gap that is large enough."""
        start = 0
        for slot in sorted(self._used):
            if slot[0][0] - start >= size:
                return start
            start = -(-slot[-1][1] // _ALIGNMENT) * _ALIGNMENT
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
        self._held: dict[Slot, weakref.ref[Any]] = {}

    def read(self, slot: Slot) -> Any:
        begin, end = slot[0][0], slot[-1][1]
        if end > len(self._bytes):
            self._bytes = np.frombuffer(mmap.mmap(self._file.descriptor, 0, access=self._access), np.uint8)
        region = self._bytes[begin:end]
        self._held[slot] = weakref.ref(region)  # lives as long as any array that is read from it
        view = memoryview(region)  # type: ignore[arg-type]
        data, *buffers = (view[start - begin : stop - begin] for start, stop in slot)
        return pickle.loads(data, buffers=buffers)

    def released(self) -> list[Slot]:
        """What nothing refers to any more, each reported once."""
        gone = [slot for slot, region in self._held.items() if region() is None]
        for slot in gone:
            del self._held[slot]
        return gone
