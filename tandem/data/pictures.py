"""Pictures of a row, as verl and TRL write them: columns `images`, `image`, and parts of messages -> sources, in the
order of the placeholders."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.data.chat import Messages
from tandem.data.rows import BadRow, Row
from tandem.pictures.sources import IMAGE_PARTS, source_of
from tandem.types import Picture

PLACEHOLDER = "<image>"
"""In the text of a message that is not the policy's: verl's."""


def take_pictures(row: Row, messages: Messages, *, takes_pictures: bool) -> tuple[Messages, list[Any]]:
    """The messages with parts {"type": "image"} where pictures stand, and what each is made of, in that order.

    Where no placeholder stands, the pictures come before the text of the first user's message, as in TRL. Messages
    without pictures hold text. Raises BadRow unless each picture has a placeholder.
    """
    column = _column(row, takes_pictures)
    if takes_pictures and row.get("video") is not None:
        raise BadRow("column `video`: videos are not read; leave it out, or give frames as `images`")
    given = iter(column)
    split = [_parts(message, bool(column) or takes_pictures) for message in messages]
    if column and not any(part["type"] in IMAGE_PARTS for parts in split for part in parts):
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        split[first] = [{"type": "image"}] * len(column) + split[first]
    sources: list[Any] = []
    made: Messages = []
    for message, parts in zip(messages, split, strict=True):
        content: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] in IMAGE_PARTS:
                own = source_of(part)
                sources.append(next(given, None) if own is None else own)
                content.append({"type": "image"})
            else:
                content.append(part)
        pictured = any(part["type"] == "image" for part in content)
        made.append({**message, "content": content if pictured else "".join(part["text"] for part in content)})
    left = len(list(given))
    if missing := sum(source is None for source in sources):
        where = "" if len(sources) > missing else "; they are looked for in the columns `images` and `image`"
        raise BadRow(f"{len(sources)} placeholders, but {len(sources) - missing} pictures{where}")
    if left:
        raise BadRow(f"{len(sources)} placeholders, but {len(sources) + left} pictures")
    return made, sources


def refuse_pictures(row: Row, *, takes_pictures: bool) -> None:
    """Raises BadRow where a row whose prompt is plain text has pictures: where they stand is the template's matter."""
    if _column(row, takes_pictures):
        raise BadRow("pictures need a prompt of messages, which go through the chat template; this one is plain text")


def without_pixels(row: Row, messages: Messages, pictures: Sequence[Picture]) -> Row:
    """The row as it travels: the pictures' keys in the place of what they are made of."""
    keys = [picture.key for picture in pictures]
    changed = {name: keys for name in ("images", "image") if row.get(name)}
    left = iter(keys)
    shown = [{**message, "content": _with_keys(message["content"], left)} for message in messages]
    return {**row, **changed, "prompt": shown}


def _with_keys(content: Any, keys: Iterator[str]) -> Any:
    """Parts name the picture that they show."""
    if isinstance(content, str):
        return content
    return [{**part, "key": next(keys)} if part["type"] == "image" else part for part in content]


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
