"""Messages through shared memory: written once, mapped by every reader, arrays not copied again.

    writer --Arena.write--> region of an anonymous file --View.read--> value, its large arrays lie in the region
           <- Arena.free -- the regions that nothing refers to any more <--View.released--

Where a message lies (`Place`), and which regions are free again, travels on another way, such as a pipe. A region is
used again when every reader has let go of it: pages that are mapped already cost nothing, fresh ones a fault each.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Iterable
from itertools import accumulate
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np

OUT_OF_BAND_BYTES = 1 << 14
"""Smaller arrays are copied with the rest of the message, and again where they are read."""
_ALIGNMENT = 64
_FIRST_BYTES = 1 << 20


class Place(NamedTuple):
    """Of a message: the pickle, then its buffers, each aligned."""

    start: int
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> list[int]:
        """Where each part begins, and the end of the last."""
        return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes), initial=self.start))


class SharedFile:
    """An anonymous file in memory, gone with its last user; as an argument of a new process the same file there."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("tandem") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.descriptor),)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _received(duplicate: Any) -> SharedFile:
    return SharedFile(duplicate.detach())


class Arena:
    """The writing end of a file."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._used: dict[int, tuple[int, int]] = {}
        """Start of a region -> its end, and how many readers hold it."""
        self._grow(_FIRST_BYTES)

    def write(self, value: Any, readers: int = 1) -> Place:
        """Raises what pickling the value raises."""
        buffers: list[memoryview] = []

        def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= OUT_OF_BAND_BYTES:
                buffers.append(raw)
            return raw.nbytes < OUT_OF_BAND_BYTES

        parts = [pickle.dumps(value, 5, buffer_callback=stays_in_band), *buffers]
        sizes = tuple(map(len, parts))
        place = Place(self._find(Place(0, sizes).offsets[-1]), sizes)
        for part, offset in zip(parts, place.offsets, strict=False):
            self._memory[offset : offset + len(part)] = part
        self._used[place.start] = place.offsets[-1], readers
        return place

    def free(self, starts: Iterable[int]) -> None:
        """One reader has let go of these regions."""
        for start in starts:
            end, readers = self._used.pop(start)
            if readers > 1:
                self._used[start] = end, readers - 1

    def _find(self, size: int) -> int:
        """The first gap that is large enough."""
        start = 0
        for begin, (end, _) in sorted(self._used.items()):
            if begin - start >= size:
                return start
            start = end
        if start + size > len(self._memory):
            self._grow(start + size)
        return start

    def _grow(self, size: int) -> None:
        size = 1 << (size - 1).bit_length()
        os.ftruncate(self._file.descriptor, size)
        self._memory = mmap.mmap(self._file.descriptor, size)


class View:
    """A reading end. Arrays that are read may be kept for ever; with `writable` they may be changed as well."""

    def __init__(self, file: SharedFile, writable: bool = False) -> None:
        self._file = file
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._bytes = np.empty(0, np.uint8)
        self._held: dict[int, weakref.ref[Any]] = {}

    def read(self, place: Place) -> Any:
        *offsets, end = place.offsets
        if end > len(self._bytes):
            size = os.fstat(self._file.descriptor).st_size
            self._bytes = np.frombuffer(mmap.mmap(self._file.descriptor, size, access=self._access), np.uint8)
        region = self._bytes[place.start : end]
        self._held[place.start] = weakref.ref(region)  # lives as long as any array that is read from it
        view = memoryview(region)  # type: ignore[arg-type]
        parts = [view[at - place.start :][:size] for at, size in zip(offsets, place.sizes, strict=True)]
        return pickle.loads(parts[0], buffers=parts[1:])

    def released(self) -> list[int]:
        """Starts of the regions that nothing refers to any more, each told once."""
        gone = [start for start, region in self._held.items() if region() is None]
        for start in gone:
            del self._held[start]
        return gone
