"""What a chat is made of, as requests give it: messages, calls of tools and their results, descriptions of tools."""

import json
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tandem import types


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Nested(Strict):
    """An object within a request: what is null in it is as if it were left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in cast(dict[str, Any], given).items() if value is not None}


def _content_of(content: Any) -> Any:
    """Text, also where it comes in parts; parts where pictures are among them."""
    if not isinstance(content, list):
        return content
    parts = [_part_of(number, part) for number, part in enumerate(cast(list[Any], content))]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _part_of(number: int, part: Any) -> dict[str, Any]:
    kind: Any = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "image", "image": _url_of(number, part.get("image_url"))}
    raise ValueError(f"part {number} is not of type text or image_url, which alone are understood")


def _url_of(number: int, image: Any) -> str:
    """Of a picture, which is in it."""
    given = cast(dict[str, Any], image) if isinstance(image, dict) else {}
    url, detail = given.get("url"), given.get("detail")
    if not isinstance(url, str) or given.keys() - {"url", "detail"}:
        raise ValueError(f'part {number}: give image_url as {{"url": "data:image/png;base64,…"}}')
    if not url.startswith("data:"):
        raise ValueError(f"part {number}: {url[:100]}: nothing is fetched; send the picture itself, as a data: URL")
    if detail not in (None, "auto", "high"):
        raise ValueError(f"part {number}: detail {detail!r}: the model has one size for a picture; leave it out")
    return url


def _object_of(arguments: Any) -> Any:
    """A call's arguments come as JSON; nothing stands for none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ValueError("give a JSON object as text") from None


class CalledFunction(Nested):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object_of)] = {}


class ToolCall(Nested):
    """A call of a tool in an answer's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """As messages have it that are put together from a stream."""


class Message(Nested):
    """A turn; it may be an answer's message, which has further fields that are null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_content_of)] = Field(
        default=None, validate_default=True
    )
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @field_validator("content")
    @classmethod
    def _fits_the_role(cls, content: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "assistant")
        if content is None and role != "assistant":
            raise PydanticCustomError("missing", "Field required")
        if isinstance(content, list) and role not in ("user", "tool"):
            raise ValueError("only messages of roles user and tool have pictures")
        return content

    @field_validator("tool_calls", "reasoning_content")
    @classmethod
    def _only_answers_have_them(cls, given: Any, info: ValidationInfo) -> Any:
        if given and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only messages of role assistant have it")
        return given

    def plain(self) -> types.Message:
        """As chat templates take it."""
        told = self.model_dump(exclude_none=True, exclude={"tool_calls", "annotations"})
        if self.tool_calls:
            told["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return {"content": ""} | told


def _as_described(tool: dict[str, Any]) -> dict[str, Any]:
    """What templates show of a tool: all that is said but `strict`, which no engine here holds calls to."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('give {"type": "function", "function": {"name": …, "parameters": …}}')
    said = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return {"type": "function", "function": said}


Tool = Annotated[dict[str, Any], AfterValidator(_as_described)]
