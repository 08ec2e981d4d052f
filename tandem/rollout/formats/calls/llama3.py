"""`{"name": …, "parameters": {…}}`, several with `;` between them, or behind `<|python_tag|>`: Llama 3.1 to 3.3.

Without that tag nothing but its name tells a call from other JSON: it is one where the name is a tool's on offer.
"""

import re
from collections.abc import Sequence
from typing import Any

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, call_of, json_at, split_thinking

_TAG = "<|python_tag|>"
_OBJECT = re.compile(r"\{(?=\s*[\"'])")
"""Where an object of JSON, or of what is meant as such, begins."""
_INSIDE = re.compile(r"[\"']\s*:\s*\Z")
"""What stands before an object that is the value of another one's key."""
_BEGINS = r"\{{\s*[\"'](?:type[\"']\s*:\s*[\"']function[\"']\s*,\s*[\"'])?(?:name|function)[\"']\s*:\s*[\"'](?:{})[\"']"
"""How a call of tools with these names begins, in good JSON or bad."""
_ANY_NAME = r"[^\"']+"
_NEAR = 64
"""Characters of an object, or before one, that are looked at."""
_BETWEEN = "; \n"
_AROUND = re.compile(r"(?:```\w*)?[\s\[\],;]*(?:```)?")
"""What is left of a list of calls, or of a code block around them."""
_MOST_UNREADABLE = 64
"""Objects that are no JSON and no call: behind that many nothing is looked for, since each takes time."""


def read_llama3(text: str, tools: Sequence[ToolSchema]) -> Answer:
    first = _OBJECT.search(text)
    reasoning, text = split_thinking(text, text[first.start() : first.start() + _NEAR] if first else _TAG)
    head, tagged, rest = text.partition(_TAG)
    if tagged and not _OBJECT.match(rest.lstrip("[ \n")):
        return Answer(text.strip(), (), reasoning, (broken(BrokenCall(f"no JSON follows {_TAG}"), rest),))
    calls, failures = list[ToolCall](), list[str]()
    said = _read(head, [re.escape(tool["function"]["name"]) for tool in tools], calls, failures)
    said = (said + _read(rest, [_ANY_NAME], calls, failures)).strip()
    return Answer("" if calls and _AROUND.fullmatch(said) else said, tuple(calls), reasoning, tuple(failures))


def _read(text: str, names: Sequence[str], calls: list[ToolCall], failures: list[str]) -> str:
    """Read the calls of tools whose names are one of these patterns; returns what is text."""
    is_name, begins = re.compile("|".join(names)), re.compile(_BEGINS.format("|".join(names)))
    said, unreadable = "", 0
    while names and unreadable < _MOST_UNREADABLE and (found := _OBJECT.search(text)):
        said, text = said + text[: found.start()], text[found.start() :]
        try:
            value, after = json_at(text)
        except BrokenCall as error:
            if begins.match(text):
                failed = _up_to(text, begins)
                failures.append(broken(error, failed))
                said, text = said + failed, text[len(failed) :].lstrip(_BETWEEN)
            else:
                said, text, unreadable = said + text[:1], text[1:], unreadable + 1
            continue
        written, text = text[: len(text) - len(after)], after
        if _INSIDE.search(said[-_NEAR:]) or not is_name.fullmatch(_name(value)):
            said += written
            continue
        try:
            calls.append(call_of(value))
        except BrokenCall as error:
            failures.append(broken(error, written))
            said += written
        text = text.lstrip(_BETWEEN)
    return said + text


def _up_to(text: str, begins: re.Pattern[str]) -> str:
    """A call that is no JSON, up to where the next one begins, else all."""
    ends = (found.start() for found in re.finditer(r"[;\n][^\S\n]*(?=\{)", text) if begins.match(text, found.end()))
    return text[: next(ends, len(text))]


def _name(value: Any) -> str:
    """What an object calls, "" where that is nothing."""
    inner = value.get("function")
    name = inner.get("name") if isinstance(inner, dict) else value.get("name") or inner
    return name if isinstance(name, str) else ""


LLAMA3 = CallFormat("llama3", read_llama3, ("<|start_header_id|>ipython",))
