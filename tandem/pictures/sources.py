"""What a picture is given as -> its encoded bytes, or the picture itself. Nothing is fetched."""

import base64
import binascii
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from tandem.pictures.prepare import MAX_SOURCE_BYTES, BadPicture, read_source

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a message that stand for a picture."""
VIDEO_PART = "video"
"""Type of the part of a message that stands for a video."""
SOURCES = ("bytes", "image", "path", "image_url", "url")
"""Keys of a picture given as a dict, in the order in which they are looked at."""

_PATH_LETTERS = 4096
"""Longer paths than file systems have are base64."""
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8", b"BM", b"II", b"MM")
"""Of the files of the formats that are read."""


def source_of(part: dict[str, Any]) -> Any:
    """What a dict says that its picture is; None where it says nothing."""
    return next((part[key] for key in SOURCES if part.get(key) is not None), None)


def read_picture(source: Any, folder: Path) -> "bytes | Image":
    """Bytes, text (a path, a data URL, base64), a picture of Pillow's, an array uint8 `[H, W, 3]`, or a dict of one of
    them. `folder`: where paths begin, else at the working directory. Raises BadPicture."""
    if isinstance(source, dict):
        given = source_of(source)
        if given is None:
            raise BadPicture(f"a dict with {', '.join(source) or 'nothing'}; it must have bytes, path or image")
        return read_picture(given, folder)
    if isinstance(source, bytes):
        if not source:
            raise BadPicture("it has no bytes")
        _check_length(len(source), "it")
        return source
    if isinstance(source, str):
        return _bytes_of_text(source, folder)
    if is_image(source):
        return source
    if isinstance(source, np.ndarray):
        return _image_of(source)
    raise BadPicture(f"the wrong type: {type(source).__name__}; bytes, a path, base64 text or a dict of them are read")


def is_image(value: Any) -> bool:
    """Whether it is a picture of Pillow's, which need not be imported to tell."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def in_words(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """What a message says, for those who see no pictures."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else not_shown(part) for part in content or ())


def not_shown(part: Mapping[str, Any]) -> str:
    return f"[{part.get('description') or part['type']}: not shown]"


def of_data_url(url: str) -> bytes:
    """Raises BadPicture where it is no `data:` URL in base64."""
    head, _, body = url.partition(",")
    if not head.startswith("data:"):
        raise BadPicture(f"{url[:100]}: nothing is fetched; give the picture itself, as a data: URL")
    if not head.endswith(";base64"):
        raise BadPicture("a data: URL that is not base64")
    _check_length(len(body) * 3 // 4, "the data: URL")
    return _unbase64(body, "the data: URL")


def _image_of(pixels: "np.ndarray[Any, Any]") -> "Image":
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise BadPicture(f"an array of {pixels.dtype} {list(pixels.shape)}; a picture is uint8 [height, width, 3]")
    return Image.fromarray(pixels)


def _bytes_of_text(text: str, folder: Path) -> bytes:
    if text.startswith("data:"):
        return of_data_url(text)
    if re.match("(?i)[a-z0-9]+://", text) and not text.startswith("file://"):
        raise BadPicture(f"{text[:100]}: nothing is fetched; download the pictures first, and give their paths")
    path = unquote(text.removeprefix("file://")) if text.startswith("file://") else text
    if (found := next(filter(_is_file, _places(path, folder)), None)) is not None:
        return read_source(found)
    _check_length(len(text) * 3 // 4, "the text")
    looked = f"(looked in {folder} and {Path.cwd()})"
    try:
        data = _unbase64(text, "the text")
    except BadPicture as error:
        raise BadPicture(f"{text[:100]!r} is no base64 and no file {looked}") from error
    if len(text) < _PATH_LETTERS and not data.startswith(_BEGINNINGS):
        raise BadPicture(f"{text[:100]!r} is no file {looked}, and in base64 no picture")
    return data


def _places(path: str, folder: Path) -> Iterator[Path]:
    """Where a path may lead."""
    if 0 < len(path) < _PATH_LETTERS and "\0" not in path and max(map(len, path.split("/"))) < 256:
        yield folder / path
        yield Path.cwd() / path


def _is_file(place: Path) -> bool:
    """Not so where the file system refuses the name: base64 may be longer than it takes."""
    try:
        return place.is_file()
    except OSError:
        return False


def _check_length(count: int, what: str) -> None:
    if count > MAX_SOURCE_BYTES:
        raise BadPicture(f"{what} has {count:,} bytes, more than {MAX_SOURCE_BYTES:,}")


def _unbase64(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture(f"{what} is no base64: {error}") from error
    if not data:
        raise BadPicture(f"{what} is empty")
    return data
