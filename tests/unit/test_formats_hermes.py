"""What a turn in the format of Hermes and Qwen says."""

from __future__ import annotations

import pytest

from tandem.rollout.formats.calls.hermes import read_hermes

CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
ONE = CALL % '{"a": 1}'


@pytest.mark.parametrize(
    "text, calls, content, reasoning",
    [
        (ONE, [{"a": 1}], "", None),
        ("Let me see.\n" + ONE, [{"a": 1}], "Let me see.", None),
        (ONE + "\n" + CALL % '{"a": 2}', [{"a": 1}, {"a": 2}], "", None),
        (f"<think>\nHm.\n</think>\n\n{ONE}", [{"a": 1}], "", "Hm."),
        (f"Hm.</think>{ONE}", [{"a": 1}], "", "Hm."),
        (f"<think>\nI will {ONE}", [], "", f"I will {ONE}"),
        (f"<think>\nuse {ONE}\n</think>\n\nDone.", [], "Done.", f"use {ONE}"),
        (f"<think>a</think>So<think>b {ONE}</think>{ONE}", [{"a": 1}], "So", f"a\nb {ONE}"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', [{"a": 1}], "", None),
        (CALL % '{"s": "x </tool_call> y"}', [{"s": "x </tool_call> y"}], "", None),
        (CALL % '{"s": "x </think> y"}', [{"s": "x </think> y"}], "", None),
        (CALL % '"{\\"a\\": 1}"', [{"a": 1}], "", None),
        ('<tool_call>{"name": "f"}</tool_call>Done.', [{}], "Done.", None),
        (CALL % '{"a": "1"}', [{"a": "1"}], "", None),
        ("No call.", [], "No call.", None),
        ("", [], "", None),
    ],
)
def test_what_is_read(text: str, calls: list[dict[str, object]], content: str, reasoning: str | None) -> None:
    answer = read_hermes(text, [])
    assert [call.arguments for call in answer.tool_calls] == calls
    assert {call.name for call in answer.tool_calls} <= {"f"}
    assert (answer.content, answer.reasoning, answer.broken) == (content, reasoning, ())


@pytest.mark.parametrize(
    "call, why",
    [
        ('{"name": "f", "arguments": {"a": 1}', "Expecting"),
        ("{'name': 'f', 'arguments': {'a': __import__('os')}}", "Expecting"),
        ('{"name": "f", oops}', "Expecting"),
        ('{"arguments": {}}', "no name of a tool"),
        ('{"name": 3}', "no name of a tool"),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "x"}', "Expecting value"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "f"} and more', "followed by 'and more"),
        ("[" * 100_000, "its JSON cannot be read"),
    ],
)
def test_a_broken_call_is_told_and_hides_no_good_one(call: str, why: str) -> None:
    answer = read_hermes(f"{ONE}<tool_call>\n{call}\n</tool_call>{ONE}", [])
    assert [c.arguments for c in answer.tool_calls] == [{"a": 1}] * 2
    assert len(answer.broken) == 1 and why in answer.broken[0] and len(answer.broken[0]) < 400
