"""Pictures of a row, as verl and TRL write them -> stored pictures, and their places among the token ids.

columns `images`, `image`; parts of messages  ->  sources, in the order of the placeholders
sources  ->  stored pictures                   ->  token ids with as many placeholders as each takes
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from tandem.config.tree import ImagesConfig
from tandem.data.chat import IMAGE_PARTS, Messages
from tandem.data.rows import BadRow, Row
from tandem.errors import UserError
from tandem.pictures.model import MODEL_TYPES, PictureFormat, picture_format
from tandem.pictures.prepare import BadPicture, Limits, Preparer, read_source
from tandem.pictures.store import PictureStore
from tandem.types import IntArray, Picture

PLACEHOLDER = "<image>"
"""In the text of a message that is not the policy's: verl's."""
_SOURCES = ("bytes", "image", "path", "image_url", "url")
"""Keys of a picture given as a dict, in the order in which they are looked at."""


class RowPictures:
    """Prepares the pictures of rows for one model.

    `directory`: of the store, which is made when the first picture comes.
    """

    def __init__(self, model: Path, config: ImagesConfig, directory: Path):
        self._model, self._config, self._directory = model, config, directory

    @cached_property
    def format(self) -> PictureFormat | None:
        """None where the model takes no pictures that are prepared here."""
        return picture_format(self._model)

    @cached_property
    def _preparer(self) -> Preparer:
        if self.format is None:
            known = ", ".join(MODEL_TYPES)
            raise UserError(
                f"the rows have pictures, and {self._model} is no model that sees them here (model_type {known}); "
                "take such a model, or leave out the columns `images` and `image` and the messages' parts of pictures"
            )
        least = self._config.min_pixels or self.format.min_pixels
        most = self._config.max_pixels or self.format.max_pixels
        if most < max(least, self.format.factor**2):
            raise UserError(
                f"data.images.max_pixels: {most:,} is less than min_pixels, {least:,}, or than the "
                f"{self.format.factor**2:,} pixels that are one token of {self._model}; raise it"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        limits = Limits(self.format.factor, least, most, self._config.max_source_pixels)
        return Preparer(PictureStore(self._directory), limits)

    def prepare(self, sources: Sequence[Any], folder: Path) -> list[Picture]:
        """Stored pictures, their places not known yet. `folder`: that of the data file. Raises BadRow, and UserError
        where the model sees no pictures."""
        pictures: list[Picture] = []
        for number, source in enumerate(sources, start=1):
            preparer = self._preparer
            try:
                pictures.append(Picture(*preparer.prepare(_bytes_of(source, folder)), place=-1))
            except BadPicture as error:
                raise BadRow(f"picture {number} of {len(sources)}: {error}") from error
        tokens, limit = sum(p.grid[0] * p.grid[1] for p in pictures), self._config.max_image_tokens
        if limit is not None and tokens > limit:
            raise BadRow(f"the pictures take {tokens:,} tokens; data.images.max_image_tokens is {limit:,}")
        return pictures

    def expand(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[IntArray, IntArray, list[Picture]]:
        """Token ids with all placeholders, which token of `token_ids` each one comes from, and the pictures with their
        places. Raises BadRow unless each picture has one placeholder; a placeholder that a text spells out is one."""
        ids = np.array(token_ids, np.int32)
        if self.format is None:
            return ids, np.arange(len(ids)), []
        if self.format.video_id is not None and self.format.video_id in ids:
            raise BadRow("the text holds the model's own token for a video, and videos are not supported")
        found = np.flatnonzero(ids == self.format.placeholder_id)
        if len(found) != len(pictures):
            raise BadRow(f"{len(pictures)} pictures and {len(found)} placeholders for them, after the chat template")
        counts = np.ones(len(ids), np.int64)
        counts[found] = [picture.grid[0] * picture.grid[1] for picture in pictures]
        places = (np.cumsum(counts) - counts)[found]
        placed = [Picture(p.key, p.grid, int(place)) for p, place in zip(pictures, places, strict=True)]
        return np.repeat(ids, counts), np.repeat(np.arange(len(ids)), counts), placed


def take_pictures(row: Row, messages: Messages, *, takes_pictures: bool) -> tuple[Messages, list[Any]]:
    """The messages with parts {"type": "image"} where pictures stand, and what each is made of, in that order.

    Where no placeholder stands, the pictures come before the text of the first user's message, as in TRL. Messages
    without pictures hold text. Raises BadRow unless each picture has a placeholder.
    """
    column = _column(row, takes_pictures)
    given = iter(column)
    split = [_parts(message, bool(column)) for message in messages]
    if column and not any(part["type"] in IMAGE_PARTS for parts in split for part in parts):
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        split[first] = [{"type": "image"}] * len(column) + split[first]
    sources: list[Any] = []
    made: Messages = []
    for message, parts in zip(messages, split, strict=True):
        content: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] in IMAGE_PARTS:
                own = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
                sources.append(next(given, None) if own is None else own)
                content.append({"type": "image"})
            else:
                content.append(part)
        pictured = any(part["type"] == "image" for part in content)
        made.append({**message, "content": content if pictured else "".join(part["text"] for part in content)})
    left = len(list(given))
    if missing := sum(source is None for source in sources):
        raise BadRow(f"{len(sources)} placeholders, but {len(sources) - missing} pictures")
    if left:
        raise BadRow(f"{len(sources)} placeholders, but {len(sources) + left} pictures")
    return made, sources


def refuse_pictures(row: Row) -> None:
    """Raises BadRow where a row whose prompt is plain text has pictures: where they stand is the template's matter."""
    if row.get("images"):
        raise BadRow("pictures need a prompt of messages, which go through the chat template; this one is plain text")


def without_pixels(row: Row, messages: Messages, pictures: Sequence[Picture]) -> Row:
    """The row as it travels: the pictures' keys in the place of what they are made of."""
    changed = {name: [picture.key for picture in pictures] for name in ("images", "image") if row.get(name)}
    return {**row, **changed, "prompt": messages}


def _column(row: Row, takes_pictures: bool) -> list[Any]:
    """What the columns `images` and `image` hold. A text at `image` means a picture to models that take pictures; other
    data sets keep other things there."""
    single = row.get("image")
    if isinstance(single, str) and not takes_pictures:
        single = None
    found: list[Any] = []
    for value in (row.get("images"), single):
        if isinstance(value, list):
            found += value
        elif value:
            found.append(value)
    if row.get("images") and single:
        raise BadRow("both columns `images` and `image` hold pictures; leave one out")
    return found


def _parts(message: dict[str, Any], split: bool) -> list[dict[str, Any]]:
    """The content of a message as parts. `split`: <image> in what is said to the policy is a placeholder."""
    content = message["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not split or message["role"] not in ("system", "user", "tool"):
        return texts
    parts: list[dict[str, Any]] = []
    for part in texts:
        if part["type"] != "text":
            parts.append(part)
            continue
        for piece in re.split(f"({PLACEHOLDER})", part["text"]):
            if piece:
                parts.append({"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece})
    return parts


def _bytes_of(source: Any, folder: Path) -> bytes:
    """The encoded picture: bytes, text (a path, a data URL, base64), or a dict of one of them. Raises BadPicture."""
    if isinstance(source, dict):
        given = next((source[key] for key in _SOURCES if source.get(key) is not None), None)
        if given is None:
            raise BadPicture(f"a dict with {', '.join(source) or 'nothing'}; it must have bytes, path or image")
        return _bytes_of(given, folder)
    if isinstance(source, bytes):
        if not source:
            raise BadPicture("it has no bytes")
        return source
    if isinstance(source, str):
        return _bytes_of_text(source, folder)
    raise BadPicture(f"the wrong type: {type(source).__name__}; bytes, a path, base64 text or a dict of them are read")


def _bytes_of_text(text: str, folder: Path) -> bytes:
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise BadPicture("a data: URL that is not base64")
        return _unbase64(body, "the data: URL")
    if re.match("(?i)[a-z0-9]+://", text) and not text.startswith("file://"):
        raise BadPicture(f"{text[:100]}: nothing is fetched; download the pictures first, and give their paths")
    path = unquote(text.removeprefix("file://")) if text.startswith("file://") else text
    tried = list(_places(path, folder))
    if (found := next((place for place in tried if place.is_file()), None)) is not None:
        return read_source(found)
    try:
        return _unbase64(text, "the text")
    except BadPicture as error:
        raise BadPicture(f"{text[:100]!r} is no base64 and no file (looked in {folder} and {Path.cwd()})") from error


def _places(path: str, folder: Path) -> Iterator[Path]:
    """Where a path may lead. Longer ones than file systems have are base64."""
    if 0 < len(path) < 4096 and "\0" not in path and max(map(len, path.split("/"))) < 256:
        yield folder / path
        yield Path.cwd() / path


def _unbase64(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture(f"{what} is no base64: {error}") from error
    if not data:
        raise BadPicture(f"{what} is empty")
    return data
