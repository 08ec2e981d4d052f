"""Small versions of stored pictures, to be seen on a page."""

import base64
import io

import numpy as np

from tandem.errors import UserError
from tandem.pictures.store import PictureStore, Pixels

_SIDE = 128
"""Pixels of the longer side, at most; a picture of few pixels is enlarged to half of that."""


def thumbnail(store: PictureStore, key: str) -> str | None:
    """A `data:` URL; None where the picture is not there any more, or damaged."""
    from PIL import Image

    pixels = small_pixels(store, key)
    if pixels is None:
        return None
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode('ascii')}"


def small_pixels(store: PictureStore, key: str) -> Pixels | None:
    """`[height, width, 3]`; None where the picture is not there any more, or damaged."""
    from PIL import Image

    try:
        picture = Image.fromarray(store.read(key))
    except UserError:
        return None
    scale = min(_SIDE / max(picture.size), max(1.0, _SIDE / 2 / max(picture.size)))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    smooth = Image.Resampling.BICUBIC if scale < 1 else Image.Resampling.NEAREST
    return np.asarray(picture.resize((width, height), smooth))
