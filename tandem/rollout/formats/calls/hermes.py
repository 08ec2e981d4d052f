"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5 and Qwen3, but for Qwen3-Coder."""

from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import (
    BrokenCall,
    CallFormat,
    broken,
    call_of,
    cut,
    joined_thinking,
    json_at,
    split_thinking,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n,;]"
"""What may stand between and behind calls in one pair of tags."""


def read_hermes(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types, and the tags mark a call, whatever its name
    reasoning, text = split_thinking(text, _OPEN)
    said, calls, failures = "", list[ToolCall](), list[str]()
    while _OPEN in text:
        before, _, text = text.partition(_OPEN)
        kept, text = _read_tag(text, calls, failures)
        said += before + kept
        later, text = split_thinking(text, _OPEN)
        reasoning = joined_thinking(reasoning, later)
    return Answer((said + text).strip(), tuple(calls), reasoning, tuple(failures))


def _read_tag(text: str, calls: list[ToolCall], failures: list[str]) -> tuple[str, str]:
    """Read what follows an opening tag: one call, or several in a row, also in a list.

    Returns what stays text of it, and what follows the closing tag, which may be missing.
    """
    kept, left = "", text
    while True:
        try:
            value, rest = json_at(left.lstrip().removeprefix("[") if left is text else left)
            more = rest.lstrip(_BETWEEN)
            if more and not more.startswith(("{", _OPEN, _CLOSE)):
                raise BrokenCall(f"its JSON is followed by {rest.strip()[:40]!r} and not by {_CLOSE}")
        except BrokenCall as error:
            failed, behind = cut(left, _OPEN, _CLOSE)
            failures.append(broken(error, failed))
            return kept + _OPEN + failed, behind
        written = left[: len(left) - len(rest)]
        try:
            calls.append(call_of(value))
        except BrokenCall as error:
            failures.append(broken(error, written))
            kept += _OPEN + written + _CLOSE
        if not more.startswith("{"):
            return kept, more.removeprefix(_CLOSE)
        left = more


HERMES = CallFormat("hermes", read_hermes, ("<tool_call>", "arguments"), is_general=True)
