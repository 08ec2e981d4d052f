"""Formats that transformers reads by a description, its response templates, but each call by itself.

`tokenizer.parse_response` raises for a whole turn where one of its calls is broken.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing.content_parsers import parse_content, process_field
from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, ReadsAnswer, broken, call_of
from tandem.rollout.formats.calls.schema import cast

GEMMA4: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought", "close_pattern": r"<channel\|>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>(?:call:)?(?P<name>[^{\s<]*)",
            "close_pattern": r"<tool_call\|>\s*",
            "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<turn\|>|<\|tool_response>", "content": "text"},
    },
}
"""`<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>`."""
_UNREAD = "text of a call"
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)


def by_response_template(template: Mapping[str, Any]) -> ReadsAnswer:
    """A reader by one of transformers' response templates. Raises ValueError where it is none."""
    spec = load_response_template(dict(template))
    as_text = load_response_template(dict(template))
    field = spec.fields.get("tool_calls")
    if field is not None:
        captures = {name: f"{{{name}}}" for name in field.open_re.groupindex}
        as_text.fields["tool_calls"] = replace(
            field, content="text", content_args={}, transform={_UNREAD: "{content}"} | captures, transform_each=False
        )

    untyped = field is not None and field.content == "xml-inline"

    def read(text: str, tools: Sequence[ToolSchema]) -> Answer:
        parser, left = ResponseParser(as_text, prefix=""), ""
        parser.feed(text)
        said, _ = parser.finalize()
        calls, failures = list[ToolCall](), list[str]()
        for captured in said.get("tool_calls", ()):
            body = captured.pop(_UNREAD)
            try:
                call = _call(body, field, captured)
                calls.append(_cast(call, tools) if untyped else call)
            except BrokenCall as error:
                failures.append(broken(error, f"{' '.join(captured.values())} {body}"))
                left += _as_written(text, body, field)
        reasoning = said.get("reasoning_content", said.get("thinking"))
        return Answer((said.get("content", "") + left).strip(), tuple(calls), reasoning, tuple(failures))

    return read


def _as_written(text: str, body: str, field: Any) -> str:
    """A call with what opens it, from the `text` of the turn."""
    openings = (found for found in field.open_re.finditer(text) if text[found.end() :].lstrip().startswith(body))
    opening = next((found[0] for found in openings), "")
    return opening + body


def _call(body: str, field: Any, captures: Mapping[str, str]) -> ToolCall:
    """Raises BrokenCall."""
    try:
        if _loses_a_value(body, field):
            raise BrokenCall("one of its keys stands twice")
        made = process_field(body, field, dict(captures))
    except BrokenCall:
        raise
    except (ValueError, KeyError, RecursionError) as error:
        raise BrokenCall(f"it cannot be read: {str(error).splitlines()[0]}") from error
    return call_of(made.get("function", made) if isinstance(made, dict) else made)


def _loses_a_value(body: str, field: Any) -> bool:
    """Whether a key stands twice in a body: the parsers keep one of its values."""
    value = parse_content(body, field.content, field.content_args)
    if field.content == "xml-inline":
        return value != parse_content(body, field.content, {**field.content_args, "merge_duplicates": True})
    if field.content != "json":
        return False
    for opening, closing in field.content_args.get("string_delims", ()):
        body = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}", "", body, flags=re.DOTALL)
    return _QUOTED.sub("", body).count(":") > _keys(value)


def _keys(value: Any) -> int:
    """How many there are in a value, at any depth."""
    if isinstance(value, dict):
        return len(value) + sum(map(_keys, value.values()))
    return sum(map(_keys, value)) if isinstance(value, list) else 0


def _cast(call: ToolCall, tools: Sequence[ToolSchema]) -> ToolCall:
    """Arguments that are text, of the types that the tool's schema gives them."""
    arguments = {
        key: cast(value, call.name, key, tools) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=arguments)


GEMMA4_CALLS = CallFormat("gemma4", by_response_template(GEMMA4), ("<|tool_call>call:",))
