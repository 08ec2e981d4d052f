"""Pictures in conversations: what messages show -> stored pictures -> tokens.

    {"type": "image", "image": SOURCE} --stored--> {"type": "image", "key": KEY} --Lines--> tokens, and their places

From the moment at which the policy is told of a picture messages have its key alone: they are written to files, and
sent to other processes.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.errors import UserError
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.pictures.sources import IMAGE_PARTS, VIDEO_PART, in_words
from tandem.pictures.videos import Video
from tandem.rollout.environment import ToolSchema
from tandem.rollout.formats.base import Format
from tandem.rollout.threads import in_thread
from tandem.types import IntArray, Message, Picture

Content = str | list[dict[str, Any]]
"""What a message says: text, or parts of text and of pictures."""


class Line(NamedTuple):
    """Exact tokens, and the pictures among them."""

    ids: IntArray
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Lines:
    """What a format makes of messages, with as many tokens for each picture as it takes. Pictures are stored already;
    `pictures` is None where the model sees none."""

    chat_format: Format
    pictures: ModelPictures | None

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Line:
        """As Format.open; raises UserError also where the template leaves a picture out."""
        return self._expanded(self.chat_format.open(messages, tools), messages)

    def extend(self, line: Line, new: Sequence[Message], tools: Sequence[ToolSchema]) -> Line | None:
        """`line`, which ends in a turn of the policy, and what is said to it then; None as of Format.extend."""
        added = self.chat_format.extend(line.ids.tolist(), new, tools)
        if added is None:
            return None
        told, start = self._expanded(added, new), len(line.ids)
        moved = (replace(picture, place=start + picture.place) for picture in told.pictures)
        return Line(np.concatenate((line.ids, told.ids)), (*line.pictures, *moved))

    def _expanded(self, ids: Sequence[int], messages: Sequence[Message]) -> Line:
        try:
            return with_all_tokens(ids, messages, self.pictures)
        except BadPicture as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"the pictures in messages of {roles}: {error}; put a template that shows each of them once into "
                "chat_template.jinja"
            ) from error


def with_all_tokens(ids: Sequence[int], messages: Sequence[Message], pictures: ModelPictures | None) -> Line:
    """The template's tokens of messages, with all those of their pictures, which are stored. Raises BadPicture."""
    if pictures is None:
        return Line(np.array(ids, np.int32))
    shown = [_shown_by(part, pictures) for part in _shown_parts(messages)]
    expanded, _, placed = pictures.expand(ids, shown)
    return Line(expanded, tuple(placed))


def _shown_by(part: Mapping[str, Any], pictures: ModelPictures) -> Picture | Video:
    if part["type"] in IMAGE_PARTS:
        return pictures.stored(part["key"])
    if "keys" not in part:
        raise BadPicture("a video that is no row's: videos come with the rows of data")
    return pictures.stored_video(part["keys"], part["seconds"], part["fps"])


def stored(messages: Sequence[Message], pictures: ModelPictures | None) -> list[Message]:
    """The messages, whose parts name the keys of their pictures. For a model that sees none: as they are. Raises
    BadPicture."""
    if pictures is None or not any(picture_parts(messages)):
        return list(messages)
    return [{**message, "content": _stored(message["content"], pictures)} for message in messages]


async def stored_aside(messages: Sequence[Message], pictures: ModelPictures | None) -> list[Message]:
    """As `stored`; the event loop goes on while pictures are decoded."""
    if pictures is None or all("key" in part for part in picture_parts(messages)):
        return list(messages)
    return await in_thread(stored, messages, pictures)


async def shown(content: Content, pictures: ModelPictures | None) -> Content:
    """What a tool says, with the keys of its pictures; for a model that sees none, text that tells of them. Raises
    BadPicture."""
    if isinstance(content, str):
        return content
    if pictures is None:
        return in_words(content)
    (message,) = await stored_aside([{"role": "tool", "content": content}], pictures)
    return message["content"]


def appended(content: Content, more: Content) -> Content:
    """Both, one after the other."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    if not more:
        return content
    return [part for parts in (content, more) for part in _as_parts(parts) if part.get("text") != ""]


def with_data_urls(row: Mapping[str, Any], pictures: ModelPictures | None) -> Mapping[str, Any]:
    """A row for a program that shows the policy its pictures: they are in it, where their keys were."""
    if pictures is None:
        return row
    urls: dict[str, Any] = {
        name: [_data_url(key, pictures) for key in row[name]] for name in ("images", "image") if row.get(name)
    }
    given = row.get("prompt")
    if isinstance(given, list):
        urls["prompt"] = [{**message, "content": _with_data_urls(message["content"], pictures)} for message in given]
    return {**row, **urls}


def _with_data_urls(content: Any, pictures: ModelPictures) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": _data_url(part["key"], pictures)}} if "key" in part else part
        for part in content
    ]


def _data_url(key: str, pictures: ModelPictures) -> str:
    return f"data:image/png;base64,{base64.b64encode(pictures.encoded(key)).decode('ascii')}"


def _as_parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def picture_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Those that stand for a picture."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part.get("type") in IMAGE_PARTS)


def _shown_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Those that stand for a picture or a video."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part.get("type") in (VIDEO_PART, *IMAGE_PARTS))


def _stored(content: Any, pictures: ModelPictures) -> Any:
    if not isinstance(content, list):
        return content
    new = [part for part in content if part.get("type") in IMAGE_PARTS and "key" not in part]
    made = iter(pictures.prepare(new, Path.cwd()))
    return [part if part.get("type") not in IMAGE_PARTS else _named(part, pictures, made) for part in content]


def _named(part: dict[str, Any], pictures: ModelPictures, made: Iterator[Picture]) -> dict[str, Any]:
    picture = pictures.stored(part["key"]) if "key" in part else next(made)
    return {"type": "image", "key": picture.key}
