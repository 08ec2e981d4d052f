"""How the tiny model of examples/letters.py calls the one tool that it has: `<tool_call>12*34</tool_call>`, no JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem import Answer, ToolCall

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|system|>' + tool.function.name + '<|end|>' }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function.arguments.values() | list | first) + '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALL_TAGS = ["<tool_call>", "</tool_call>"]


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """What stands in the tags is the only argument that the tool requires."""
    content, _, call = text.partition("<tool_call>")
    if not call:
        return Answer(content)
    [tool] = tools
    [argument] = tool["function"]["parameters"]["required"]
    called = ToolCall("call_0", tool["function"]["name"], {argument: call.partition("</tool_call>")[0]})
    return Answer(content, tool_calls=(called,))


def opening(tool: str, question: str) -> list[dict[str, Any]]:
    """The messages that a demonstration begins with: the chat template tells the policy no more of a tool than this."""
    return [{"role": "system", "content": tool}, {"role": "user", "content": question}]


def call_and_result(tool: str, argument: str, value: str, result: str) -> list[dict[str, Any]]:
    """The messages of a call in a demonstration."""
    function = {"name": tool, "arguments": {argument: value}}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "tool_call_id": "call_0", "content": result},
    ]
