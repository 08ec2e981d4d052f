"""What a format makes of a row's messages and tools, tried out before a run: each fault with the text that shows it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

from tandem.rollout.environment import ToolSchema
from tandem.rollout.formats.chat_template import with_text
from tandem.rollout.formats.control_tokens import unused_word
from tandem.rollout.formats.template import THOUGHT_BEGINS, TemplateFormat
from tandem.types import Message

_SHOWN = 60
"""Characters of a text on each side of a fault."""
_THOUGHT_AT_END = re.compile(rf"(?:{'|'.join(map(re.escape, THOUGHT_BEGINS))})\s*(?:</think>\s*)?$")
_EXAMPLES: Mapping[str, Any] = {
    "string": "text",
    "integer": 3,
    "number": 0.5,
    "boolean": True,
    "array": ["text"],
    "object": {"key": 1},
}


def problems(format: TemplateFormat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """A sentence for each thing that is wrong with a conversation that `messages` open, which end with the user's.

    Raises UserError where it cannot be held at all.
    """
    if tools:
        format.require_tools()
    messages = [with_text(message) for message in messages]
    yield from _in_letters(format, messages, tools)
    yield from _lost(format, messages, tools)
    for tool in tools:
        yield from _unread(format, messages, tool, tools)
    if format.refuses_users is None:
        turn, new = {"role": "assistant", "content": "Yes."}, [{"role": "user", "content": "Go on."}]
        yield from _misplaced(format, messages, turn, new, tools)


def _in_letters(format: TemplateFormat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Iterator[str]:
    for name in format.spelled(messages, tools):
        yield (
            f"a text spells the control token {name}: the policy gets it as letters, and a server that applies the "
            "template by itself makes the token of it"
        )


def _lost(format: TemplateFormat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """Text that the tokenizer has no tokens for. Space around control tokens may belong to them."""
    expected, made = format.rendered(messages, tools), format.text(format.open(messages, tools))
    squeezed = [normalize("NFC", "".join(text.split())) for text in (expected, made)]
    if squeezed[0] != squeezed[1]:
        yield "the tokens of the opening messages do not give their text back: {} is {}".format(*_differ(*squeezed))


def _unread(
    format: TemplateFormat, messages: Sequence[Message], tool: ToolSchema, tools: Sequence[ToolSchema]
) -> Iterator[str]:
    """A call that the template has rendered is read as that call."""
    name, arguments = tool["function"]["name"], _example(tool)
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    new = [{"role": "tool", "name": name, "tool_call_id": "call00001", "content": "text"}]
    misplaced = [*_misplaced(format, messages, turn, new, tools)]
    if misplaced:
        yield from misplaced
        return
    prompt = _prompt(format, messages, tools)
    stop, tail = format.tail(new, tools, unused_word(new, tools))
    written = format.rendered([*messages, turn, *new], tools)[len(prompt) : -len(stop + tail)]
    answer = format.parse(format.encoded(prompt), format.encoded(written), tools)
    read = [(made.name, dict(made.arguments)) for made in answer.tool_calls]
    if json.dumps(read, sort_keys=True) != json.dumps([(name, arguments)], sort_keys=True):
        found = " ".join(answer.broken) or f"{read or 'no call'}"
        yield f"a call of {name} with {arguments} is written as {written!r}, and read as: {found}"


def _misplaced(
    format: TemplateFormat,
    messages: Sequence[Message],
    turn: Message,
    new: Sequence[Message],
    tools: Sequence[ToolSchema],
) -> Iterator[str]:
    """Tokens are appended as the template writes the whole conversation."""
    whole, prompt = format.rendered([*messages, turn, *new], tools), _prompt(format, messages, tools)
    stop, tail = format.tail(new, tools, unused_word(new, tools))
    if not whole.startswith(prompt):
        yield "the template changes the opening messages once the policy has spoken: {} becomes {}".format(
            *_differ(prompt, whole)
        )
    if not whole.endswith(stop + tail):
        ends = whole[-len(stop + tail) :]
        yield f"{stop + tail!r} is appended to the conversation, and the template ends it in {ends!r}"


def _prompt(format: TemplateFormat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
    """Up to the policy's turn, without a thought that the generation prompt begins: templates leave it out later."""
    return _THOUGHT_AT_END.sub("", format.rendered(messages, tools))


def _differ(expected: str, found: str) -> tuple[str, str]:
    """Both around the first place at which they differ."""
    pairs = zip(expected, found, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    window = slice(max(0, place - _SHOWN), place + _SHOWN)
    return repr(expected[window]), repr(found[window])


def _example(tool: ToolSchema) -> dict[str, Any]:
    """Arguments of the types that the tool declares."""
    declared = (tool["function"].get("parameters") or {}).get("properties") or {}
    return {name: _value(schema) for name, schema in declared.items()}


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if "properties" in schema:
        return {name: _value(inner) for name, inner in schema["properties"].items()}
    kind = schema.get("type", "string")
    return _EXAMPLES.get(kind if isinstance(kind, str) else kind[0])
