"""What published chat templates differ in: the key of thoughts, and how they take the arguments of a call."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for what was thought before its content."""
_ONE_OF_BOTH = "Cannot pass both content and thinking"
"""gpt-oss refuses a turn that calls a tool, thinks and says something: the last two become one there."""
Message = Mapping[str, Any]


def thought_of(message: Message) -> str:
    """What was thought before the content; "" where nothing was."""
    return next((str(message[key]) for key in THOUGHTS if message.get(key)), "")


def prepared(message: Message, template: str, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """The message as the template takes it. `arguments_as_text`: of calls, which it takes as JSON."""
    made = dict(message)
    key, thought = thought_key(template), thought_of(message)
    if key is not None and thought:
        made |= {key: thought}
        if _ONE_OF_BOTH in template and message.get("tool_calls") and message["content"]:
            made |= {key: f"{thought}\n{message['content']}", "content": ""}
    if arguments_as_text and message.get("tool_calls"):
        made["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return made


@lru_cache(maxsize=16)
def thought_key(template: str) -> str | None:
    """The key of a message in which the template reads what was thought; None where it reads none."""
    return next((key for key in THOUGHTS if re.search(rf"[.'\"]{key}\b", template)), None)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
