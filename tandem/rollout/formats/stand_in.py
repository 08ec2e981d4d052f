"""Messages that stand for others: a turn of the policy whose end can be found, and what a template is tried with."""

from collections.abc import Sequence
from typing import Any

from tandem.types import Message

PROBE = "Qz7x"
ASKED: list[Message] = [{"role": "user", "content": "u"}]
USER_SPEAKS: list[Message] = [{"role": "user", "content": "Qz7yUser"}]
TOOL_ANSWERS: list[Message] = [{"role": "tool", "name": "q", "tool_call_id": "call00000", "content": "Qz7yTool"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Qz7yName",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "d"}},
            "required": ["x"],
        },
    },
}


def stand_in(results: Sequence[Message], mark: str) -> Message:
    """A turn of the policy that ends in `mark`, and calls what `results` answer."""
    calls = [
        {
            "id": result.get("tool_call_id") or f"call{number:05d}",
            "type": "function",
            "function": {"name": result.get("name") or "f", "arguments": {"x": mark}},
        }
        for number, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else _says(mark)


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


SPOKEN = [*ASKED, _says("a") | {"reasoning_content": "t"}, {"role": "user", "content": "v"}]
"""Two turns, to see whether what a template writes later depends on them."""
CALLED = [*ASKED, stand_in(TOOL_ANSWERS, "1") | {"reasoning_content": "t"}, *TOOL_ANSWERS, *SPOKEN[1:]]
