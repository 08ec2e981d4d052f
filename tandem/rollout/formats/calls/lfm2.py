"""`<|tool_call_start|>[NAME(key='value', …), …]<|tool_call_end|>`: LFM2. Python's syntax, of which nothing is run."""

import ast
from collections.abc import Sequence
from typing import Any

from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.formats.calls.base import BrokenCall, CallFormat, broken, split_thinking, unread

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON_WORDS = {"true": True, "false": False, "null": None}


def read_lfm2(text: str, tools: Sequence[ToolSchema]) -> Answer:
    del tools  # literals carry types, and the tags mark a call, whatever its name
    reasoning, text = split_thinking(text, _OPEN)
    said, *blocks = text.split(_OPEN)
    calls, failures = list[ToolCall](), list[str]()
    for block in blocks:
        block, closed, rest = block.partition(_CLOSE)
        before, failed = len(calls), list[str]()
        try:
            for node in _listed(block):
                try:
                    calls.append(_call(node))
                except BrokenCall as error:
                    failed.append(ast.get_source_segment(block.strip(), node) or ast.unparse(node))
                    failures.append(broken(error, failed[-1]))
        except BrokenCall as error:
            failed.append(block)
            failures.append(broken(error, block))
        said += unread(_OPEN + block + closed, failed, len(calls) - before) + rest
    return Answer(said.strip(), tuple(calls), reasoning, tuple(failures))


def _listed(block: str) -> list[ast.expr]:
    """The calls in the list that `block` is. Raises BrokenCall."""
    try:
        tree = ast.parse(block.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise BrokenCall(f"it cannot be read: {error}") from error
    if isinstance(tree, ast.List) and not tree.elts:
        raise BrokenCall("it calls nothing")
    return tree.elts if isinstance(tree, ast.List) else [tree]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise BrokenCall("it is no NAME(key=value, …)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise BrokenCall("its arguments are not all key=value")
    return ToolCall("", ast.unparse(node.func), _once([(str(word.arg), _value(word.value)) for word in node.keywords]))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises BrokenCall where a key stands twice, as one of its values would be lost."""
    for place, (key, _) in enumerate(pairs):
        if any(key == later for later, _ in pairs[place + 1 :]):
            raise BrokenCall(f"{key!r} stands twice in it")
    return dict(pairs)


def _value(node: ast.expr) -> Any:
    """A literal, or one of JSON's words. Raises BrokenCall."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return _once(
            [(str(_value(key)), _value(value)) for key, value in zip(node.keys, node.values, strict=True) if key]
        )
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BrokenCall(f"{ast.unparse(node)[:40]} is no literal") from error
    if not isinstance(value, str | int | float | bool | None):
        raise BrokenCall(f"{ast.unparse(node)[:40]} is no value of JSON")
    return value


LFM2 = CallFormat("lfm2", read_lfm2, ("<|tool_call_start|>",))
