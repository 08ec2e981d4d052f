"""Boxes of tensors: which part of a weight a rank holds, and what two parts have in common.

Pure Python, for training engines (what they hold), generation engines (what they serve) and what moves weights from the
first to the second.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Array = TypeVar("Array")
Region = tuple[tuple[int, int], ...]
"""The first index and the one after the last, in each dimension."""


def whole(shape: tuple[int, ...]) -> Region:
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def elements(region: Region) -> int:
    return math.prod(shape_of(region))


def chunk(region: Region, dim: int, parts: int, part: int) -> Region:
    """One of `parts` along `dim`, as `torch.chunk` cuts: each but the last ones has the same size, and these may be
    empty."""
    start, stop = region[dim]
    size = -(-(stop - start) // parts)
    first = min(start + part * size, stop)
    return (*region[:dim], (first, min(first + size, stop)), *region[dim + 1 :])


def common(one: Region, other: Region) -> Region | None:
    """What lies in both; None where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def slices_in(outer: Region, inner: Region) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that holds `outer`."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(inner, outer, strict=True))


def pieces(region: Region, most: int) -> Iterator[Region]:
    """`region` in boxes of at most `most` elements, in the order of memory."""
    if elements(region) <= most:
        yield region
        return
    dim = next(dim for dim, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    step = max(1, most * (stop - start) // elements(region))
    for first in range(start, stop, step):
        yield from pieces((*region[:dim], (first, min(first + step, stop)), *region[dim + 1 :]), most)


@dataclass(frozen=True, slots=True)
class Shard(Generic[Array]):
    """The part of a weight that this rank holds."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    dtype: str
    """That it is served in, such as `bfloat16`; `read` may give a wider one."""
    region: Region
    read: Callable[[], Array]
    """The part's values, to be read only; no rank waits for another in it."""
