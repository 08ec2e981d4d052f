"""Messages, tools and calls of tools as data sets have them -> one form, in which chat templates take them.

docs/data.md says what is read, and what is refused by name.
"""

import json
import re
from typing import Any

from tandem.data.rows import OF_MESSAGES, BadRow, Row, cell, in_words
from tandem.pictures.sources import IMAGE_PARTS, VIDEO_PART

Messages = list[dict[str, Any]]
_LISTS = ("images", "image", "videos")
"""Other columns that may be the JSON text of a list."""
_PYTHON = re.compile(r"\[\s*\{\s*'\w+'\s*:")
_OBJECTS = re.compile(r"\[?\s*\{")
_JSON = re.compile(r'\[?\s*\{\s*"(role|content|from|value)"\s*:')
_LEARNED = (
    "weight", "loss", "loss_scale", "loss_mask", "train", "training", "train_on_turn", "trainable", "supervised",
    "learn",
)  # fmt: skip
"""Keys that say whether a turn is learned."""
_REFUSED = {
    "function_call": "calls of tools are read from `tool_calls`",
    "train_detail": "a turn is learned as a whole; split it, or leave the key out",
    "training_detail": "a turn is learned as a whole; split it, or leave the key out",
    "prefix": "no answer is continued; leave the key out, or write the prompt as text",
    "partial": "no answer is continued; leave the key out, or write the prompt as text",
    "images": "pictures are read from parts of the content, and from the column `images`",
    "videos": "videos are read from parts of the content, and from the column `videos`",
    "audios": "no model is shown sound",
}
"""Keys of a message that mean something elsewhere."""
_EITHER_WAY = ("mask", "no_loss")
"""Keys of which one trainer's 1 is another's 0."""


def without_json_text(row: Row) -> Row:
    """The row with messages, tools and lists of pictures in the place of their JSON text. Raises BadRow."""
    read: Row = {}
    for column in OF_MESSAGES:
        value = row.get(column)
        if column == "tools":
            read |= {column: _tools(value)} if value is not None else {}
        elif isinstance(value, str):
            read[column] = _messages_or_text(value, column)
    for column in _LISTS:
        value = row.get(column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            read[column] = _parsed(value, f"column `{column}`")
    return {**row, **read} if read else row


def messages_of(row: Row, column: str) -> Messages:
    """The messages in `column`, each {role, content}: role is text, content is text or a list of parts, each with its
    `type`: text, a picture or a video; calls of tools are {id, type, function: {name, arguments}} with an object of
    arguments. Further keys reach the template. Raises BadRow."""
    messages = [
        _message(item, f"column `{column}`", number) for number, item in enumerate(cell(row, column, list), start=1)
    ]
    last = messages[-1]
    if not last.get("tool_calls") and not _says_something(last["content"]):
        content = last["content"]
        if content if isinstance(content, str) else any(part["text"] for part in content):
            mend = "which many chat templates strip; give it text, or leave the row out"
            raise BadRow(f"column `{column}`: its last message holds only whitespace, {mend}")
        raise BadRow(f"column `{column}` is empty: its last message has no content")
    return messages


def trained_turns(row: Row, column: str) -> list[bool]:
    """Of each message in `column`, whether it may be learned, as its keys `weight`, `loss` or `train` say. Raises
    BadRow."""
    return [_is_trained(item, f"column `{column}`, message {n}") for n, item in enumerate(row[column], start=1)]


def refuse_prefill(prompt: Messages, column: str) -> None:
    """Raises BadRow where a prompt ends in the beginning of an answer, which a chat template would close."""
    if prompt[-1]["role"] == "assistant":
        raise BadRow(
            f"column `{column}` ends in a message of the assistant, which is not continued: the chat template closes "
            "it, and the answer is another turn; leave it out, or write the prompt as text"
        )


def tools_of(row: Row) -> list[dict[str, Any]]:
    """What the column `tools` holds, after `without_json_text`."""
    return list(row.get("tools") or [])


def _messages_or_text(text: str, column: str) -> Any:
    begins = text.lstrip()[:200]
    if _PYTHON.match(begins):
        raise BadRow(f"column `{column}` holds messages as Python prints them; write a list, or JSON")
    if not _OBJECTS.match(begins):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not _JSON.match(begins):
            return text
        raise BadRow(f"column `{column}`, which seems to be messages, is no valid JSON: {error}") from error
    if isinstance(value, dict) and _is_message(value):
        raise BadRow(f"column `{column}` holds one message as JSON text; write a list of messages")
    return value if isinstance(value, list) and all(map(_is_message, value)) else text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is no valid JSON: {error}") from error


def _tools(value: Any) -> list[dict[str, Any]]:
    listed = (_parsed(value, "column `tools`") if value.strip() else []) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise BadRow(f"column `tools` has the wrong type: {in_words(type(listed))}, not a list of descriptions")
    tools = [_parsed(tool, "column `tools`") if isinstance(tool, str) else tool for tool in listed]
    for number, tool in enumerate(tools, start=1):
        function: Any = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"column `tools`: entry {number} is no description of a function, with its `name`")
    return tools


def _message(item: Any, column: str, number: int) -> dict[str, Any]:
    place = f"{column}, message {number}"
    if isinstance(item, dict) and "role" not in item and "from" in item:
        raise BadRow(f"{place} has `from` and `value`; write `role` (user, assistant, system, tool) and `content`")
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or not item["role"].strip():
        raise BadRow(f"{column} has the wrong type: message {number} is not {{role, content}} of text")
    message = {key: value for key, value in item.items() if value is not None and key not in _LEARNED}
    for key, reason in _REFUSED.items():
        if message.get(key):
            raise BadRow(f"{place} has the key `{key}`, which is not read: {reason}")
    if found := [key for key in _EITHER_WAY if key in message]:
        raise BadRow(f"{place} has the key `{found[0]}`; write `weight`, 1 where the turn is learned and 0 where not")
    calls = _calls(message.pop("tool_calls", None), place)
    if calls:
        if message["role"] != "assistant":
            raise BadRow(f"{place} of role {message['role']} has `tool_calls`, which are the assistant's")
        message["tool_calls"] = calls
    content = message.setdefault("content", "") if calls else message.get("content")
    if isinstance(content, list):
        message["content"] = [_part(part, place) for part in content]
    elif not isinstance(content, str):
        raise BadRow(f"{column} has the wrong type: message {number} is not {{role, content}} of text")
    return message


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    listed = (_parsed(value, f"{place}: `tool_calls`") if value.strip() else []) if isinstance(value, str) else value
    if not isinstance(listed or [], list):
        raise BadRow(f"{place}: `tool_calls` has the wrong type: {in_words(type(listed))}, not a list of calls")
    return [_call(_parsed(one, place) if isinstance(one, str) else one, place) for one in listed or []]


def _call(call: Any, place: str) -> dict[str, Any]:
    """With or without the `function` around its name and arguments, which may be JSON text."""
    function: Any = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{place}: a call is not {{function: {{name, arguments}}}}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        what = f"{place}: the text of `arguments` of the call of {function['name']}"
        arguments = _parsed(arguments, what) if arguments.strip() else {}
    if not isinstance(arguments or {}, dict):
        raise BadRow(f"{place}: `arguments` of the call of {function['name']} are not an object {{…}}")
    own = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **own, "function": {"name": function["name"], "arguments": arguments or {}}}


def _part(part: Any, place: str) -> dict[str, Any]:
    """Parquet has every key of any part in every part: null ones are left out."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", VIDEO_PART, *IMAGE_PARTS) or (kind == "text" and not isinstance(part.get("text"), str)):
        known = "text with its `text`, image, image_url and video"
        raise BadRow(f"{place} has a part of type {kind!r}, or one without its text; parts are {known}")
    own = ("type", "text") if kind == "text" else part
    return {key: part[key] for key in own if part[key] is not None}


def _says_something(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] != "text" or part["text"].strip() for part in content)


def _is_trained(message: dict[str, Any], place: str) -> bool:
    said = {key: message[key] for key in _LEARNED if message.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1):
            raise BadRow(f"{place}: `{key}` is {value!r}; a turn is learned (1) or not (0), whole")
        if value and message["role"] != "assistant":
            raise BadRow(f"{place}: `{key}` is {value!r}; only turns of the assistant are learned")
    return all(said.values())
