"""`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`: DeepSeek-V3.1; and V3 and R1, where `function`
stands for the name, and name and fenced JSON come behind the separator."""

import re
from collections.abc import Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, call_of, json_at, split_thinking

_CALLS, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _SEPARATOR, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\s*")


def read_deepseek(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # JSON carries types, and the tags mark a call, whatever its name
    begins = _CALLS if _CALLS in text else _OPEN
    reasoning, text = split_thinking(text, begins)
    said, begun, called = text.partition(begins)
    pieces = called.split(_OPEN) if begun else [""]
    between, parts = ("", pieces) if begun == _OPEN else (pieces[0], pieces[1:])
    calls, failures = list[ToolCall](), list[str]()
    for part in parts:
        try:
            call, after = _call(part)
            calls.append(call)
            said += after
        except BrokenCall as error:
            failed, closed, after = part.partition(_CLOSE)
            failures.append(broken(error, failed))
            said += _OPEN + failed + closed + after.replace(_END, "")
    if begun and not parts:
        failures.append(broken(BrokenCall(f"it does not begin with {_OPEN}"), called.partition(_END)[0]))
        said += begun + called
    elif between.strip():
        said += between
    return Answer(said.strip(), tuple(calls), reasoning, tuple(failures))


def _call(part: str) -> tuple[ToolCall, str]:
    """The call that follows its opening tag, and what is said behind its closing one. Raises BrokenCall."""
    name, separated, rest = part.partition(_SEPARATOR)
    if not separated:
        raise BrokenCall(f"it has no {_SEPARATOR}")
    if (fenced := _FENCED.match(rest)) and name.strip() == "function":
        name, rest = fenced[1], rest[fenced.end() :]
    arguments, rest = json_at(rest)
    rest = rest.lstrip(" \n`")
    if rest and not rest.startswith((_CLOSE, _END)):
        raise BrokenCall(f"its JSON is followed by {rest[:40]!r} and not by {_CLOSE}")
    call = call_of({"name": name.strip(), "arguments": arguments})
    return call, rest.removeprefix(_CLOSE).replace(_END, "")


DEEPSEEK = CallFormat("deepseek", read_deepseek, ("<｜tool▁calls▁begin｜>",))
