"""Calls whose arguments stand between tags, as text without a type: Qwen3-Coder's, and GLM's.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>
"""

import re
from collections.abc import Callable, Sequence

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, cut, joined_thinking, split_thinking
from tandem.rollout.formats.calls.schema import cast

_CLOSE = "</tool_call>"


def read_qwen3_coder(text: str, tools: Sequence[ToolSchema]) -> Answer:
    """Also Qwen3.5 and later, and Nemotron 3. `<tool_call>` may be missing, which Qwen3-Coder often forgets."""
    return _read(text, tools, _FUNCTION, _function)


def read_glm(text: str, tools: Sequence[ToolSchema]) -> Answer:
    """GLM-4.5 and later."""
    return _read(text, tools, re.compile("<tool_call>"), _glm)


_FUNCTION = re.compile(r"<tool_call>\s*(?=<function=)|<tool_call>|(?=<function=)")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?((?:(?!<parameter=|<function=|</function>).)*?)\n?</parameter>", re.DOTALL
)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>((?:(?!<arg_key>|<tool_call>).)*?)</arg_value>", re.DOTALL
)
"""A value that is not closed does not last into the next one's."""


def _read(
    text: str,
    tools: Sequence[ToolSchema],
    begins: re.Pattern[str],
    call: Callable[[str, Sequence[ToolSchema]], tuple[ToolCall, str]],
) -> Answer:
    """`call` reads what follows a match of `begins`: a call, and the text behind it; it raises BrokenCall."""
    reasoning, text = _split_thinking(text, begins)
    said, calls, failures = "", list[ToolCall](), list[str]()
    while found := begins.search(text):
        said, text = said + text[: found.start()], text[found.end() :]
        try:
            made, text = call(text, tools)
            calls.append(made)
        except BrokenCall as error:
            failed, text = cut(text, "<tool_call>", _CLOSE)
            failures.append(broken(error, failed))
            said += found[0] + failed
        later, text = _split_thinking(text, begins)
        reasoning = joined_thinking(reasoning, later)
    return Answer((said + text).strip(), tuple(calls), reasoning, tuple(failures))


def _split_thinking(text: str, begins: re.Pattern[str]) -> tuple[str | None, str]:
    found = begins.search(text)
    return split_thinking(text, found[0] or "<function=" if found else _CLOSE)


def _function(text: str, tools: Sequence[ToolSchema]) -> tuple[ToolCall, str]:
    head = re.match(r"<function=([^>\n]+)>", text)
    if not head:
        raise BrokenCall("it does not begin with <function=NAME>")
    name, text = head[1].strip(), text[head.end() :]
    arguments, text = _arguments(name, text, tools, _PARAMETER)
    if not text.lstrip().startswith("</function>"):
        raise BrokenCall(f"</function> is missing where {text.strip()[:40]!r} stands")
    return ToolCall("", name, arguments), _after(text.lstrip().removeprefix("</function>"))


def _glm(text: str, tools: Sequence[ToolSchema]) -> tuple[ToolCall, str]:
    head = re.match(r"\s*([^\s<{\[\"']+)", text)
    if not head:
        raise BrokenCall("it has no name of a tool")
    name = head[1]
    arguments, text = _arguments(name, text[head.end() :], tools, _ARGUMENT)
    if not text.lstrip().startswith(_CLOSE):  # more arguments may have been meant
        raise BrokenCall(f"{_CLOSE} is missing where {text.strip()[:40]!r} stands")
    return ToolCall("", name, arguments), _after(text)


def _arguments(
    name: str, text: str, tools: Sequence[ToolSchema], pattern: re.Pattern[str]
) -> tuple[dict[str, object], str]:
    arguments: dict[str, object] = {}
    while found := pattern.match(text):
        key = found[1].strip()
        if key in arguments:
            raise BrokenCall(f"{key!r} stands twice in it")
        arguments[key] = cast(found[2], name, key, tools)
        text = text[found.end() :]
    return arguments, text


def _after(text: str) -> str:
    return text.lstrip().removeprefix(_CLOSE) if text.lstrip().startswith(_CLOSE) else text


GLM = CallFormat("glm", read_glm, ("<arg_key>",))
QWEN3_CODER = CallFormat("qwen3_coder", read_qwen3_coder, ("<function=", "<parameter="))
