"""Pictures among token ids: what tells two prompts apart, and where their tokens stand.

All tokens of all pictures are one and the same placeholder, so token ids alone do not tell two pictures apart.
"""

from collections.abc import Sequence

import numpy as np

from tandem.types import IntArray, Picture

_WORD = 15
"""Hexadecimal digits of a key that stand for the picture: 60 bits."""


def content_ids(token_ids: IntArray, pictures: Sequence[Picture]) -> IntArray:
    """The token ids with a negative number, int64, for the tokens of each picture, which is that of its key.

    Two prompts, or beginnings of them, are the same to a model where these are, and only there.
    """
    if not pictures:
        return token_ids
    content = token_ids.astype(np.int64)
    for picture in pictures:
        content[span(picture)] = -1 - int(picture.key[:_WORD], 16)
    return content


def span(picture: Picture) -> slice:
    """Its tokens."""
    rows, columns = picture.grid
    return slice(picture.place, picture.place + rows * columns)


def rope_positions(length: int, pictures: Sequence[Picture]) -> tuple[IntArray, int]:
    """int64 `[3, length]`: time, row and column of each token of a prompt, and the position of the token after it.

    Text counts on in all three; a picture spans its grid, and what follows it counts on from its longer side: M-RoPE
    (Wang et al. 2024, Qwen2-VL, section 2.1), for still pictures.
    """
    parts: list[IntArray] = []
    done = position = 0
    for picture in pictures:
        rows, columns = picture.grid
        place = span(picture)
        parts.append(_text(position, place.start - done))
        position += place.start - done
        grid = np.indices((1, rows, columns)).reshape(3, -1)
        parts.append(position + grid)
        done, position = place.stop, position + max(rows, columns)
    parts.append(_text(position, length - done))
    return np.concatenate(parts, axis=1), position + length - done


def _text(position: int, length: int) -> IntArray:
    return np.broadcast_to(position + np.arange(length), (3, length))
