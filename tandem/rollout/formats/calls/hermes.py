"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5 and Qwen3, but for Qwen3-Coder."""

from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, broken, call_of, cut, joined_thinking, json_at, split_thinking

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types
    reasoning, text = split_thinking(text, _OPEN)
    said, calls, failures = "", list[ToolCall](), list[str]()
    while _OPEN in text:
        before, _, text = text.partition(_OPEN)
        said += before
        try:
            value, rest = json_at(text)
            calls.append(_closed(value, rest))
            later, text = split_thinking(rest.lstrip().removeprefix(_CLOSE), _OPEN)
            reasoning = joined_thinking(reasoning, later)
        except BrokenCall as error:
            call, text = cut(text, _OPEN, _CLOSE)
            failures.append(broken(error, call))
            said += _OPEN + call
    return Answer((said + text).strip(), tuple(calls), reasoning, tuple(failures))


def _closed(value: object, rest: str) -> ToolCall:
    """The call, which its closing tag or the end of the turn follows. Raises BrokenCall."""
    if rest.strip() and not rest.lstrip().startswith(_CLOSE):
        raise BrokenCall(f"its JSON is followed by {rest.strip()[:40]!r} and not by {_CLOSE}")
    return call_of(value)
