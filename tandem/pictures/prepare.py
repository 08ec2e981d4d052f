"""Encoded pictures, as data rows hold them -> stored pictures of their final size. Each is decoded once.

<store>/sizes-<layout>.jsonl    a line a picture: the SHA-256 of its bytes, the key and the size it is stored with
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tandem.pictures.layouts.base import Layout, check_shape
from tandem.pictures.recent import Recent
from tandem.pictures.store import PictureStore, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names. It knows more, some of which start other programs."""


_KNOWN = 2**19
"""Encoded pictures that are not decoded again when they come again; a third of a GiB of their hashes and sizes."""


class BadPicture(ValueError):
    """Bytes that are no picture that can be used; the message says why."""


class Prepared(NamedTuple):
    key: str
    size: tuple[int, int]
    """Height and width of what is stored."""


def decode(source: "bytes | Image", max_source_pixels: int) -> "Image":
    """The picture in `source`: RGB, upright as its EXIF says, white where it is transparent. Raises BadPicture."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own limit on pixels, and of odd metadata
            image = _opened(source) if isinstance(source, bytes) else source
            if image.width * image.height > max_source_pixels:
                told = f"{image.width:,} x {image.height:,} pixels are more than data.images.max_source_pixels"
                raise BadPicture(f"{told}, {max_source_pixels:,}")
            if isinstance(source, bytes):
                _check_frames(image)
            image.load()
            return _rgb(ImageOps.exif_transpose(image))
    except BadPicture:
        raise
    except Image.UnidentifiedImageError as error:
        size = f"{len(source):,} bytes" if isinstance(source, bytes) else "file"
        raise BadPicture(f"the {size} are no picture ({', '.join(FORMATS)} are read)") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit is above any that can be configured
        told = f"more pixels than data.images.max_source_pixels, {max_source_pixels:,}"
        raise BadPicture(f"{told}: {error}") from error
    except Exception as error:  # damaged files make decoders raise anything
        raise BadPicture(f"the picture is damaged: {str(error) or type(error).__name__}") from error


def _opened(data: bytes) -> "Image":
    """What the header says can be checked before any pixel is decoded."""
    from io import BytesIO

    from PIL import Image

    return Image.open(BytesIO(data), formats=FORMATS)


def _check_frames(image: "Image") -> None:
    # A second frame of a JPEG is a thumbnail or another exposure; of others, it moves or is another page. `n_frames`
    # would look for the last one, of which a small file may have a million.
    if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
        raise BadPicture(
            f"an animated {image.format}, or one of several pages; write the frame that is meant by itself"
        )


def _rgb(image: "Image") -> "Image":
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip at 255
    if image.mode in ("I", "F"):
        raise BadPicture(
            f"pixels of 32 bits (Pillow's mode {image.mode}), whose white is not known; write 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


class Preparer:
    """Puts pictures into a store, and knows those that it, or an earlier one with the same layout, has put there."""

    def __init__(self, store: PictureStore, layout: Layout, max_source_pixels: int):
        """`max_source_pixels`: of a picture before it is resized; decoding takes four bytes of memory or more for
        each."""
        self._store, self._layout, self._max_source_pixels = store, layout, max_source_pixels
        self._index_path = store.directory / f"sizes-{layout.name}-{max_source_pixels}.jsonl"
        self._index: Recent[str, Prepared] = Recent(_KNOWN)
        for source, made in self._read_index():
            self._index.keep(source, made)
        self.decoded = 0
        """Pictures that were not known."""

    def prepare(self, data: "bytes | Image") -> Prepared:
        """The stored picture of an encoded one, or of one that is decoded already. Raises BadPicture."""
        return self._known(data) if isinstance(data, bytes) else self._added(data)

    def prepare_two(self, first: "bytes | Image", second: "bytes | Image") -> Prepared:
        """Two frames, stored as one picture, the second one below the first. Raises BadPicture."""
        if not isinstance(first, bytes) or not isinstance(second, bytes):
            return self._added_two(first, second)
        hashes = hashlib.sha256(first).hexdigest() + hashlib.sha256(second).hexdigest()
        return self._indexed(hashlib.sha256(hashes.encode()).hexdigest(), lambda: self._added_two(first, second))

    def note(self, data: bytes, made: Prepared) -> None:
        """These bytes are of a picture that is stored already: what a file of the store holds may be cut."""
        self._index.keep(hashlib.sha256(data).hexdigest(), made)

    def _known(self, data: bytes) -> Prepared:
        return self._indexed(hashlib.sha256(data).hexdigest(), lambda: self._added(data))

    def _indexed(self, source: str, make: Callable[[], Prepared]) -> Prepared:
        known = self._index.find(source)
        if known is not None and self._store.holds(known.key):
            return known
        made = make()
        line = json.dumps([source, *made]) + "\n"
        # One write of a short line at the end of the file: two runs that share a store do not mix theirs.
        with self._index_path.open("a", encoding="ascii") as file:
            file.write(line)
        self._index.keep(source, made)
        return made

    def _added(self, source: "bytes | Image") -> Prepared:
        return self._put(self._fitted(source))

    def _added_two(self, first: "bytes | Image", second: "bytes | Image") -> Prepared:
        frames = [self._fitted(first), self._fitted(second)]
        (height, width), (other_height, other_width) = (frame.shape[:2] for frame in frames)
        if (height, width) != (other_height, other_width):
            told = f"{width} x {height} and {other_width} x {other_height} pixels"
            raise BadPicture(f"frames that the model would see with {told}; give all of a video one size")
        return self._put(np.concatenate(frames))

    def _put(self, pixels: Pixels) -> Prepared:
        self.decoded += 1
        return Prepared(self._store.add(pixels), (pixels.shape[0], pixels.shape[1]))

    def _fitted(self, source: "bytes | Image") -> Pixels:
        image = decode(source, self._max_source_pixels)
        try:
            check_shape(image.height, image.width)
            return self._layout.fit(image)
        except ValueError as error:
            raise BadPicture(str(error)) from error

    def _read_index(self) -> Iterator[tuple[str, Prepared]]:
        """A line that was cut off says nothing: its picture is decoded again."""
        if not self._index_path.exists():
            return
        with self._index_path.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                try:
                    source, key, (height, width) = json.loads(line)
                except (ValueError, TypeError):
                    continue
                yield source, Prepared(str(key), (int(height), int(width)))


def read_source(path: Path) -> bytes:
    """The bytes of a picture's file. Raises BadPicture where it cannot be read."""
    try:
        if not path.is_file():
            raise BadPicture(f"{path} is no file")
        if (size := path.stat().st_size) > MAX_SOURCE_BYTES:
            raise BadPicture(f"{path} has {size:,} bytes, more than {MAX_SOURCE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise BadPicture(f"{path} cannot be read: {error.strerror}") from error


MAX_SOURCE_BYTES = 256 << 20
"""Of one picture's file."""
