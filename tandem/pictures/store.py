"""Pictures by content: each is written once, whoever names it, and read where features are computed."""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import UserError

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""RGB, `[H, W, 3]`."""


def key_of(pixels: Pixels) -> str:
    """SHA-256 of the size and pixels, in hexadecimal."""
    height, width, _ = pixels.shape
    return hashlib.sha256(f"{height}x{width} ".encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()


class PictureStore:
    """A directory of PNG files, each named by its content. Several processes may add to it and read from it at once."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.png"

    def add(self, pixels: Pixels) -> str:
        """The key of `pixels`, `[H, W, 3]`, which are stored when this returns. Repeating it writes nothing."""
        from PIL import Image

        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size
        key = key_of(pixels)
        path = self.path(key)
        if self.holds(key):
            return key
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each writer has a file of its own: of two that add the same picture, either may put it into place.
        part = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            Image.fromarray(pixels).save(part, "PNG", compress_level=1)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return key

    def holds(self, key: str) -> bool:
        """Whether its file is there. An empty one, as a machine leaves that loses power, is not."""
        try:
            return self.path(key).stat().st_size > 0
        except FileNotFoundError:
            return False

    def bring(self, keys: Iterable[str], other: "PictureStore") -> None:
        """Copy those of `keys` that are in the other store, and not in this one."""
        for key in keys:
            path, source = self.path(key), other.path(key)
            if source.exists() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.part")
                shutil.copyfile(source, part)
                part.replace(path)

    def size(self, key: str) -> tuple[int, int] | None:
        """Height and width of the picture `key`, as its file's header tells; None where there is no such file."""
        from PIL import Image

        try:
            with Image.open(self.path(key), formats=["PNG"]) as image:
                return image.height, image.width
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    def read(self, key: str) -> Pixels:
        """The pixels that were added as `key`, `[H, W, 3]`. UserError where the file is missing or holds others."""
        from PIL import Image

        path = self.path(key)
        mend = "remove the file, and start the run again: pictures of rows are stored anew"
        try:
            with Image.open(path, formats=["PNG"]) as image:
                pixels = np.array(image)
        except FileNotFoundError as error:
            mend = "each node must see data.images.directory; if it was removed, start the run again"
            raise UserError(f"{path}: picture {key} is missing; {mend}") from error
        # A damaged PNG may raise anything of these, and its header may claim any size.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{path}: picture {key} cannot be read ({error}); {mend}") from error
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or key_of(pixels) != key:
            raise UserError(f"{path}: the file holds another picture than {key}; {mend}")
        return pixels
