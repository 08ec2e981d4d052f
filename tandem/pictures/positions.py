"""Where the tokens of pictures stand: positions in three dimensions (M-RoPE, Wang et al. 2024, arXiv:2409.12191).

Text counts on in all three dimensions. A picture's tokens have the position at which it begins as their time, and that
plus their row and their column; what follows begins after the larger of rows and columns. So a picture takes fewer
positions than tokens, and an answer goes on from where its prompt's positions end. Two frames of a video are a picture
whose time is later than the position at which the video begins, from which its rows and columns count.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tandem.types import IntArray, Picture, VideoStep


class PicturePlaces(NamedTuple):
    """Positions of segments of tokens, and which feature each picture's token takes."""

    positions: IntArray
    """int64 `[3, N]`: time, row, column."""
    ends: IntArray
    """int64 `[segments]`: the position that follows each segment."""
    numbers: tuple[int, ...]
    """Of the pictures that are shown, ascending."""
    features: IntArray
    """int64, one for each of the pictures' tokens, in their order: its place in the features of `numbers`, which are
    `rows * columns` each, head to tail."""

    def after(self, tokens: int, token_ids: IntArray) -> "PicturePlaces":
        """Of one segment without its first tokens, which are computed already."""
        known = int((token_ids[:tokens] < 0).sum())
        left = self.features[known:]
        return self._replace(
            positions=self.positions[:, tokens:], features=left, numbers=self.numbers if len(left) else ()
        )


def joined(parts: Sequence[PicturePlaces], pictures: Sequence[Picture]) -> PicturePlaces:
    """Of segments head to tail, without prefixes among them."""
    numbers = tuple(sorted({number for part in parts for number in part.numbers}))
    starts = _starts(numbers, pictures)
    features: list[IntArray] = []
    for part in parts:
        own = _starts(part.numbers, pictures)
        if part.numbers:
            which = np.searchsorted(np.array([own[number] for number in part.numbers]), part.features, "right") - 1
            shift = np.array([starts[number] - own[number] for number in part.numbers])
            features.append(part.features + shift[which])
    return PicturePlaces(
        np.concatenate([part.positions for part in parts], axis=1),
        np.concatenate([part.ends for part in parts]),
        numbers,
        np.concatenate(features) if features else np.zeros(0, np.int64),
    )


def _starts(numbers: Sequence[int], pictures: Sequence[Picture]) -> dict[int, int]:
    """Where the features of each picture begin."""
    sizes = [pictures[number].grid[0] * pictures[number].grid[1] for number in numbers]
    return dict(zip(numbers, np.cumsum([0, *sizes])[:-1].tolist(), strict=True))


class _At(NamedTuple):
    """Where a segment ends."""

    position: int
    """The next one; within a picture whose positions are spatial, that at which it begins."""
    number: int = -1
    """Of the picture that is not whole yet."""
    done: int = 0
    """Its tokens before this place."""


def places_of(
    token_ids: IntArray, offsets: IntArray, prefixes: IntArray, pictures: Sequence[Picture], *, spatial: bool
) -> PicturePlaces:
    """Of marked token ids, `[N]`, in segments as those of a MicroBatch; a picture may lie across several of them.

    `spatial`: False where the model counts a picture's tokens as it does text, and may have text between them.
    ValueError where a picture is not whole.
    """
    numbers = tuple(sorted({-1 - int(mark) for mark in np.unique(token_ids[token_ids < 0])}))
    starts = _starts(numbers, pictures)
    positions = np.empty((3, len(token_ids)), np.int64)
    features: list[IntArray] = []
    ends: list[_At] = []
    for segment, prefix in enumerate(prefixes.tolist()):
        at = ends[prefix] if prefix >= 0 else _At(0)
        start, stop = int(offsets[segment]), int(offsets[segment + 1])
        for begin, end in _runs(token_ids[start:stop]):
            begin, end, mark = start + begin, start + end, int(token_ids[start + begin])
            while begin < end:
                if mark >= 0:
                    if spatial and at.number >= 0:
                        raise ValueError(f"picture {at.number} ends after {at.done} of its tokens")
                    positions[:, begin:end] = at.position + np.arange(end - begin)
                    at, begin = at._replace(position=at.position + end - begin), end
                    continue
                number = -1 - mark
                if at.number not in (-1, number):
                    raise ValueError(f"picture {at.number} ends after {at.done} of its tokens")
                rows, columns = pictures[number].grid
                count = min(end - begin, rows * columns - at.done)
                inside = at.done + np.arange(count)
                features.append(starts[number] + inside)
                step = pictures[number].step or VideoStep(0, max(rows, columns))
                places = (0 * inside + step.time, inside // columns, inside % columns)
                positions[:, begin : begin + count] = at.position + (np.stack(places) if spatial else np.arange(count))
                whole = at.done + count == rows * columns
                after = at.position + (step.span * whole if spatial else count)
                at = _At(after) if whole else _At(after, number, at.done + count)
                begin += count
        ends.append(at)
    taken = np.concatenate(features) if features else np.zeros(0, np.int64)
    return PicturePlaces(positions, np.array([at.position for at in ends], np.int64), numbers, taken)


def _runs(token_ids: IntArray) -> list[tuple[int, int]]:
    """Begin and end of each run of text, and of each run of one picture's tokens."""
    marks = np.minimum(token_ids, 0)
    bounds = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(token_ids)]
    return list(pairwise(bounds)) if len(token_ids) else []
