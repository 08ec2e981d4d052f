"""Pictures and videos of a row, as verl and TRL write them: columns `images`, `image` and `videos`, and parts of
messages -> sources, in the order of the placeholders."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tandem.data.messages import Messages
from tandem.data.rows import BadRow, Row, in_words
from tandem.pictures.prepare import BadPicture
from tandem.pictures.sources import IMAGE_PARTS, VIDEO_PART, source_of
from tandem.pictures.videos import Video, video_source
from tandem.types import Picture

PLACEHOLDERS = {"<image>": "image", "<video>": VIDEO_PART}
"""In the text of a message that is not the policy's: verl's; and the parts that they stand for."""
_COLUMNS = {"image": ("pictures", "columns `images` and `image`"), VIDEO_PART: ("videos", "column `videos`")}


class MediaSupport(NamedTuple):
    """What the model takes beside text."""

    pictures: bool
    videos: bool


def take_pictures(row: Row, messages: Messages, takes: MediaSupport) -> tuple[Messages, list[Any]]:
    """The messages with parts {"type": "image"} and {"type": "video"} where pictures and videos stand, and what each is
    made of, in that order.

    Where no placeholder stands, they come before the text of the first user's message, as in TRL. Messages without any
    hold text. Raises BadRow unless each picture and video has a placeholder.
    """
    columns = {"image": _column(row, takes.pictures), VIDEO_PART: _videos(row, takes)}
    taken = {"image": takes.pictures, VIDEO_PART: takes.videos}
    placeholders = {text: kind for text, kind in PLACEHOLDERS.items() if columns[kind] or taken[kind]}
    split = [_parts(message, placeholders) for message in messages]
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    for kind, column in reversed(columns.items()):
        if column and not any(part["type"] == kind for parts in split for part in parts):
            split[first] = [{"type": kind}] * len(column) + split[first]
    given = {kind: iter(column) for kind, column in columns.items()}
    sources: list[tuple[str, Any]] = []
    made: Messages = []
    for message, parts in zip(messages, split, strict=True):
        for part in parts:
            if (kind := part["type"]) != "text":
                sources.append((kind, part["source"] if "source" in part else next(given[kind], None)))
        if shows := any(part["type"] != "text" for part in parts):
            parts = [part if part["type"] == "text" else {"type": part["type"]} for part in parts]
        made.append({**message, "content": parts if shows else "".join(part["text"] for part in parts)})
    for kind, left in given.items():
        _check_counts(kind, [source for own, source in sources if own == kind], len(list(left)))
    return made, [_source(kind, source) for kind, source in sources]


def _check_counts(kind: str, sources: Sequence[Any], left: int) -> None:
    """`left`: those of the columns that no placeholder has taken."""
    plural, where = _COLUMNS[kind]
    missing = sum(source is None for source in sources)
    if missing:
        told = "" if len(sources) > missing else f"; they are looked for in the {where}"
        raise BadRow(f"placeholders: {len(sources)}, but {plural}: {len(sources) - missing}{told}")
    if left:
        raise BadRow(f"placeholders: {len(sources)}, but {plural}: {len(sources) + left}")


def _source(kind: str, source: Any) -> Any:
    """As ModelPictures takes it."""
    if kind != VIDEO_PART:
        return source
    try:
        return video_source(source)
    except BadPicture as error:
        raise BadRow(str(error)) from error


def refuse_pictures(row: Row, *, takes_pictures: bool) -> None:
    """Raises BadRow where a row whose prompt is plain text has pictures: where they stand is the template's matter."""
    if _column(row, takes_pictures) or row.get("videos"):
        raise BadRow("pictures need a prompt of messages, which go through the chat template; this one is plain text")


def without_pixels(row: Row, messages: Messages, shown: Sequence[Picture | Video]) -> Row:
    """The row as it travels: the keys of pictures and of videos' steps in the place of what they are made of."""
    keys = [one.key for one in shown if isinstance(one, Picture)]
    changed: dict[str, Any] = {name: keys for name in ("images", "image") if row.get(name)}
    if row.get("videos"):
        changed["videos"] = [_named(one) for one in shown if isinstance(one, Video)]
    left = iter(shown)
    told = [{**message, "content": _with_keys(message["content"], left)} for message in messages]
    return {**row, **changed, "prompt": told}


def _named(one: Picture | Video) -> dict[str, Any]:
    if isinstance(one, Picture):
        return {"key": one.key}
    return {"keys": [step.key for step in one.steps], "seconds": list(one.seconds), "fps": one.fps}


def _with_keys(content: Any, left: Iterator[Picture | Video]) -> Any:
    """Parts name what they show."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {**part, **_named(next(left))} for part in content]


def _videos(row: Row, takes: MediaSupport) -> list[Any]:
    """What the column `videos` holds."""
    if takes.pictures and row.get("video") is not None:
        raise BadRow("column `video`: videos are read from the column `videos`, a list of them; move it there")
    videos = row.get("videos") or []
    if not isinstance(videos, list):
        raise BadRow(f"column `videos` has the wrong type: {in_words(type(videos))}, not a list of videos")
    return videos


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


def _parts(message: dict[str, Any], placeholders: dict[str, str]) -> list[dict[str, Any]]:
    """The content of a message as parts: of text, and {"type": "image" or "video"} with their `source` where they have
    one of their own. Placeholders in what is said to the policy become such parts."""
    content = message["content"]
    said = message["role"] == "assistant"
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] != "text":
            parts.append(_shown(part))
        elif said or not placeholders:
            parts.append(part)
        else:
            for piece in re.split(f"({'|'.join(placeholders)})", part["text"]):
                if piece:
                    kind = placeholders.get(piece)
                    parts.append({"type": kind} if kind else {"type": "text", "text": piece})
    return parts


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    """A part that is no text, with what it says that it shows."""
    if part["type"] in IMAGE_PARTS:
        source = source_of(part)
        return {"type": "image"} if source is None else {"type": "image", "source": source}
    return {"type": VIDEO_PART, "source": part} if part.keys() - {"type", "text"} else {"type": VIDEO_PART}
