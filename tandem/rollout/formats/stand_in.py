"""Messages that stand for others: a turn of the policy whose end can be found, and what a template is tried with."""

from collections.abc import Sequence
from itertools import takewhile
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


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """The same where every result names the call that it answers, which Mistral's template insists on: those that say
    that a call could not be read name none."""
    return [
        message | {"tool_call_id": f"call{place:05d}"}
        if message["role"] == "tool" and not message.get("tool_call_id")
        else message
        for place, message in enumerate(messages)
    ]


def with_calls(messages: Sequence[Message]) -> list[Message]:
    """The same where every result answers a call: one is made up where the policy's could not be read."""
    made = list(messages)
    for place in range(len(made)):
        results = list(takewhile(lambda message: message["role"] == "tool", made[place + 1 :]))
        if results and made[place]["role"] == "assistant" and not made[place].get("tool_calls"):
            made[place] = made[place] | {"tool_calls": stand_in(results, "")["tool_calls"]}
    return made


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


SPOKEN = [*ASKED, _says("a") | {"reasoning_content": "t"}, {"role": "user", "content": "v"}]
"""Two turns, to see whether what a template writes later depends on them."""
CALLED = [*ASKED, stand_in(TOOL_ANSWERS, "1") | {"reasoning_content": "t"}, *TOOL_ANSWERS, *SPOKEN[1:]]
