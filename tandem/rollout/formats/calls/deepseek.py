"""`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`: DeepSeek-V3.1; and V3 and R1, where `function`
stands for the name, and name and fenced JSON come behind the separator."""

import re
from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, broken, call_of, json_at, split_thinking

_CALLS, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _SEPARATOR, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\s*")


def read_deepseek(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types
    reasoning, text = split_thinking(text, _CALLS)
    said, _, called = text.partition(_CALLS)
    calls, failures = list[ToolCall](), list[str]()
    for part in called.split(_OPEN)[1:]:
        try:
            calls.append(_call(part))
        except BrokenCall as error:
            failed, closed, _ = part.partition(_CLOSE)
            failures.append(broken(error, failed))
            said += _OPEN + failed + closed
    if called.strip() and not calls and not failures:
        failures.append(broken(BrokenCall(f"it does not begin with {_OPEN}"), called.partition(_END)[0]))
        said += _CALLS + called
    return Answer(said.strip(), tuple(calls), reasoning, tuple(failures))


def _call(part: str) -> ToolCall:
    name, separated, rest = part.partition(_SEPARATOR)
    if not separated:
        raise BrokenCall(f"it has no {_SEPARATOR}")
    if (fenced := _FENCED.match(rest)) and name.strip() == "function":
        name, rest = fenced[1], rest[fenced.end() :]
    arguments, rest = json_at(rest)
    if rest.strip(" \n`") and not rest.lstrip(" \n`").startswith(_CLOSE):
        raise BrokenCall(f"its JSON is followed by {rest.strip()[:40]!r} and not by {_CLOSE}")
    return call_of({"name": name.strip(), "arguments": arguments})
