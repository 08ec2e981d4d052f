"""Items as one Arrow file that is read through a memory map: what is not looked at is not in memory.

A record batch holds `ROWS_PER_BATCH` items or a few more or less, and beside them the CRC-32 of its buffers, which is
compared when the batch is first read. A file is whole or absent, and its end says how many items it has.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from tandem.errors import UserError

Item = TypeVar("Item")
Array = np.ndarray[Any, np.dtype[Any]]
ROWS_PER_BATCH = 1024
_TYPES: Mapping[np.dtype[Any], Any] = {np.dtype(np.int32): pa.int32(), np.dtype(np.bool_): pa.uint8()}


class Packed(NamedTuple):
    """An item without its place in the data set."""

    arrays: tuple[Array, ...]
    """Each int32 or bool, of one dimension."""
    text: str


def pack(items: Sequence[Packed]) -> pa.RecordBatch:
    """One batch of at least one item."""
    columns: list[Any] = []
    for arrays in zip(*(item.arrays for item in items), strict=True):
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        columns.append(pa.ListArray.from_arrays(_column(offsets), _column(np.concatenate(arrays))))
    columns.append(pa.array([item.text for item in items], pa.large_string()))
    return pa.record_batch(columns, names=[*map(str, range(len(columns) - 1)), "text"])


def _column(values: Array) -> Any:
    """Without a copy. `pa.array` would import pandas, which takes a second."""
    return pa.Array.from_buffers(_TYPES[values.dtype], len(values), [None, pa.py_buffer(values)])


def checksum(batch: pa.RecordBatch) -> bytes:
    """CRC-32 of the buffers, as metadata of a batch has it."""
    value = 0
    for column in batch.columns:
        for buffer in column.buffers():
            value = zlib.crc32(memoryview(buffer), value) if buffer is not None and buffer.size else value
    return b"%08x" % value


class PackedItems(Sequence[Item], Generic[Item]):
    """The items of a file that `pack` made batches of. Reading one takes some tens of microseconds."""

    def __init__(self, path: Path, sizes: Sequence[int], unpack: Callable[[Packed, int], Item], first: int) -> None:
        """`sizes`: items of each batch. `unpack` makes an item of what was packed and its place in the data set, which
        begins at `first`. Raises UserError where the file is not what was written, as reading an item does."""
        self._path = path
        self._ends = [*accumulate(sizes)]
        self._unpack, self._first = unpack, first
        try:
            self._file: Any = pa.ipc.open_file(pa.memory_map(str(path)))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(str(error)) from error
        if self._file.num_record_batches != len(sizes):
            raise self._damaged(f"{self._file.num_record_batches} batches, not {len(sizes)}")
        self._checked = np.zeros(len(sizes), np.bool_)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        batch = self._batch(number)
        row = index - (self._ends[number - 1] if number else 0)
        *columns, text = batch.columns
        arrays = tuple(_row_of(column, row) for column in columns)
        return self._unpack(Packed(arrays, text[row].as_py()), self._first + index)

    def _batch(self, number: int) -> Any:
        try:
            batch, metadata = self._file.get_batch_with_custom_metadata(number)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(str(error)) from error
        if not self._checked[number]:
            if metadata is None or metadata.get(b"crc32") != checksum(batch):
                raise self._damaged(f"batch {number} is not what was written")
            self._checked[number] = True
        return batch

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self._path} is damaged ({reason}); delete it, and it is made anew")


def _row_of(column: Any, row: int) -> Array:
    """A copy, which keeps no part of the file in memory."""
    start, end = (column.offsets[place].as_py() for place in (row, row + 1))
    flat = column.values
    kind = np.int32 if flat.type == pa.int32() else np.bool_
    return np.frombuffer(flat.buffers()[1], kind)[flat.offset + start : flat.offset + end].copy()
