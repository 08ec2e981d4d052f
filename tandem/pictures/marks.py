"""Token ids that tell pictures apart.

In a prompt the tokens of every picture are the same placeholder, so prompts with other pictures of one size have the
same tokens. Some models put others between them, such as the ends of rows: these are text. Whoever compares prompts by
their tokens, to compute once what they share, marks them first: the tokens of the picture with number n become -1 - n,
whichever prompt shows it.
"""

from collections.abc import Sequence

import numpy as np

from tandem.types import IntArray, Picture, VideoStep


class PictureNumbers:
    """Numbers for pictures, from 0 on, in the order in which they are first met; the same content, the same number, but
    for frames at other times of a video."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        """By number."""
        self._numbers: dict[tuple[str, VideoStep | None], int] = {}

    def mark(self, token_ids: IntArray, pictures: Sequence[Picture]) -> IntArray:
        """`token_ids` itself where there are no pictures, else a copy with theirs marked. ValueError where a picture is
        not among them."""
        if not pictures:
            return token_ids
        marked = token_ids.copy()
        for picture in pictures:
            marked[_tokens_of(picture, marked)] = -1 - self._number(picture)
        return marked

    def _number(self, picture: Picture) -> int:
        number = self._numbers.setdefault((picture.key, picture.step), len(self.pictures))
        if number == len(self.pictures):
            self.pictures.append(picture)
        return number


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
