"""Token ids that tell pictures apart.

In a prompt the tokens of every picture are the same placeholder, so prompts with other pictures of one size have the
same tokens. Some models put others between them, such as the ends of rows: these are text. Whoever compares prompts by
their tokens, to compute once what they share, marks them first: the tokens of the picture with number n become -1 - n,
whichever prompt shows it.
"""

from collections.abc import Iterable, Sequence
from zlib import crc32

import numpy as np

from tandem.types import IntArray, Picture, VideoStep


class PictureNumbers:
    """Numbers for pictures, from 0 on, in the order in which they are first met; the same content, the same number, but
    for frames at other times of a video."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        """By number."""
        self._numbers: dict[tuple[str, VideoStep | None], int] = {}
        self._free: list[int] = []
        """Numbers of pictures that were forgotten."""

    @property
    def known(self) -> int:
        """Pictures that have a number."""
        return len(self._numbers)

    def mark(self, token_ids: IntArray, pictures: Sequence[Picture]) -> IntArray:
        """`token_ids` itself where there are no pictures, else a copy with theirs marked. ValueError where a picture is
        not among them."""
        if not pictures:
            return token_ids
        marked = token_ids.copy()
        for picture in pictures:
            marked[_tokens_of(picture, marked)] = -1 - self._number(picture)
        return marked

    def forget(self, living: Iterable[IntArray]) -> None:
        """Give the numbers that stand in none of these marked token ids to other pictures."""
        used = {int(mark) for token_ids in living for mark in np.unique(token_ids[token_ids < 0])}
        for one, number in list(self._numbers.items()):
            if -1 - number not in used:
                del self._numbers[one]
                self._free.append(number)

    def _number(self, picture: Picture) -> int:
        number = self._numbers.get((picture.key, picture.step))
        if number is None:
            number = self._free.pop() if self._free else len(self.pictures)
            self._numbers[picture.key, picture.step] = number
            self.pictures[number : number + 1] = [picture]
        return number


def content_marked(token_ids: IntArray, pictures: Sequence[Picture]) -> IntArray:
    """As PictureNumbers.mark, but a picture's mark follows from its content, without a memory. Two pictures of 2^31 may
    have the same: for those to whom prompts may look alike that are not."""
    if not pictures:
        return token_ids
    marked = token_ids.copy()
    for picture in pictures:
        marked[_tokens_of(picture, marked)] = -1 - (crc32(f"{picture.key} {picture.step}".encode()) >> 1)
    return marked


def _tokens_of(picture: Picture, token_ids: IntArray) -> IntArray:
    """Where they stand: as many of the token at its place as it has features, from there on."""
    count, place = picture.grid[0] * picture.grid[1], picture.place
    found = np.zeros(0, np.int64)
    if 0 <= place < len(token_ids) and token_ids[place] >= 0:
        found = place + np.flatnonzero(token_ids[place:] == token_ids[place])[:count]
    if len(found) < count:
        told = f"takes {count} tokens from {place} on, and {len(found)} of {len(token_ids)} are there"
        raise ValueError(f"picture {picture.key} {told}")
    return found


def unmarked(token_ids: IntArray, placeholder: int) -> IntArray:
    """With the model's placeholder in the place of marks."""
    return np.where(token_ids < 0, token_ids.dtype.type(placeholder), token_ids)
