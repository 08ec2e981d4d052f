"""Messages that say the same have the same fingerprint, however clients lay them out.

Clients give back what they were answered with null fields, with JSON laid out anew, with text in parts, and without the
reasoning. What an edited message, a summary or another tool says is another thing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.types import Message


def fingerprints(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Of the tools, and of these with each longer beginning of `messages`: `[messages + 1]`."""
    digests = [_digest(b"", [_without_nulls(tool) for tool in tools])]
    for message in messages:
        digests.append(fingerprint(message, after=digests[-1]))
    return digests


def fingerprint(message: Message, after: bytes) -> bytes:
    """Of the conversation with the fingerprint `after`, and this message."""
    return _digest(after, _meaning(message))


def reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Of each message, empty where it has none."""
    return tuple(message.get("reasoning_content") or "" for message in messages)


def same_reasonings(given: Sequence[str], recorded: Sequence[str]) -> bool:
    """Those that are given are the recorded ones; a client may leave out any."""
    return all(not one or one == other for one, other in zip(given, recorded, strict=True))


def _meaning(message: Message) -> list[Any]:
    calls = [
        [call.get("id"), call["function"]["name"], _arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    named = None if message["role"] == "assistant" else message.get("name")
    return [message["role"], _said(message.get("content")), calls, message.get("tool_call_id"), named]


def _said(content: Any) -> Any:
    """Text in one piece; where there are pictures, what stands between their keys."""
    if isinstance(content, str):
        return content
    said: list[Any] = [""]
    for part in content or ():
        if "key" in part:
            said += [[part["key"]], ""]
        else:
            said[-1] += part["text"]
    return said if len(said) > 1 else said[0]


def _arguments(given: Any) -> Any:
    """An object, also where it comes as JSON."""
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given or "{}")
    except ValueError:
        return given


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(before + text.encode()).digest()
