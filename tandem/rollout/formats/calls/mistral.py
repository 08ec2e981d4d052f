"""`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` for each call: Mistral."""

import re
from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, call_of, json_at, split_thinking, unread

_OPEN = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]([^\[\]]*))?(?:\[ARGS\])?(?=\s*\{)")
_BETWEEN = " \t\r\n,"
_NEXT = re.compile(r'(?<=\}),\s*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"arguments"')
"""Both keys, since an argument may be a list of objects too."""


def read_mistral(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types, and the tag marks a call, whatever its name
    reasoning, text = split_thinking(text, _OPEN, ("[THINK]", "[/THINK]"))
    said, *parts = text.split(_OPEN)
    calls, failures = list[ToolCall](), list[str]()
    for part in parts:
        try:
            if part.lstrip().startswith(("[", "{")):
                before, (failed, rest) = len(calls), _read_list(part.lstrip(), calls, failures)
                if len(calls) == before and not failed:
                    raise BrokenCall("it calls nothing")
                said += unread(_OPEN + part.removesuffix(rest), failed, len(calls) - before) + rest
            else:
                call, rest = _named(part)
                calls.append(call)
                said += rest
        except BrokenCall as error:
            failures.append(broken(error, part))
            said += _OPEN + part
    return Answer(said.strip(), tuple(calls), reasoning, tuple(failures))


def _named(text: str) -> tuple[ToolCall, str]:
    """One call, its name before its arguments, and what follows it. Raises BrokenCall."""
    head = _NAMED.match(text)
    if not head:
        raise BrokenCall("it is no NAME[ARGS]{…}")
    arguments, rest = json_at(text[head.end() :])
    return call_of({"name": head[1], "arguments": arguments, "id": head[2]}), rest


def _read_list(text: str, calls: list[ToolCall], failures: list[str]) -> tuple[list[str], str]:
    """A JSON list of calls, or one without brackets, one at a time: one that is no JSON ends where the next begins.

    Returns the text of broken ones, and what follows the list.
    """
    unreadable, listed = list[str](), text.startswith("[")
    text = text.removeprefix("[").lstrip(_BETWEEN)
    while text.startswith("{") or (listed and text and not text.startswith("]")):
        rest = None
        try:
            value, rest = json_at(text)
            calls.append(call_of(value))
        except BrokenCall as error:
            if rest is None:
                following = _NEXT.search(text)
                rest = text[following.start() :] if following else ""
            unreadable.append(text[: len(text) - len(rest)])
            failures.append(broken(error, unreadable[-1]))
        text = rest.lstrip(_BETWEEN)
    return unreadable, text.removeprefix("]")


MISTRAL = CallFormat("mistral", read_mistral, ("[TOOL_CALLS]",))
