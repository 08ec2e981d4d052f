"""Small versions of stored pictures, to be seen on a page."""

import base64
import io
from pathlib import Path

from tandem.errors import UserError
from tandem.pictures.store import PictureStore

_SIDE = 128
"""Pixels of the longer side, at most; a picture of few pixels is enlarged to half of that."""


def thumbnail(store: PictureStore, key: str) -> str | None:
    """A `data:` URL; None where the picture is not there any more, or damaged."""
    from PIL import Image

    try:
        pixels = store.read(key)
    except UserError:
        return None
    picture = Image.fromarray(pixels)
    scale = min(_SIDE / max(picture.size), max(1.0, _SIDE / 2 / max(picture.size)))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    smooth = Image.Resampling.BICUBIC if scale < 1 else Image.Resampling.NEAREST
    png = io.BytesIO()
    picture.resize((width, height), smooth).save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode('ascii')}"


def store_of_run(run_dir: Path, directory: str | None) -> PictureStore:
    """`directory`: the run's `data.images.directory`."""
    return PictureStore(run_dir / "pictures" if directory is None else Path(directory))
