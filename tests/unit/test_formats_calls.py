"""What a turn says in each format of calls: good, broken, quoted in a thought, cast by the tool's schema."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rollout.formats.calls import FORMATS, written_by
from tandem.rollout.formats.calls.response_template import by_response_template
from tandem.rollout.formats.calls.schema import cast

PROPERTIES = {
    "a": {"type": "integer"},
    "x": {"type": "number"},
    "s": {"type": "string"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "null"]},
    "one_of": {"enum": ["1", "2"]},
    "gone": {"type": "string", "nullable": True},
    "free": {},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}
]


def qwen3(**arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def glm(**arguments: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>f\n{pairs}</tool_call>"


def deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
HERMES = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>'
LLAMA = '{"name": "f", "parameters": %s}'
MISTRAL = '{"name": "f", "arguments": %s}'
OSS = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"
THOUGHT = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"
GEMMA = '<|tool_call>call:f{a:1,s:<|"|>x {a:2} "y"<|"|>}<tool_call|>'
LFM = "<|tool_call_start|>"
ONE, TWO = {"a": 1}, {"a": 2}

GOOD: list[tuple[str, str, list[dict[str, Any]], str, str | None]] = [
    ("qwen3_coder", "Let me.\n" + qwen3(a="1", s="x\ny"), [{"a": 1, "s": "x\ny"}], "Let me.", None),
    ("qwen3_coder", qwen3(a="1") + "\n" + qwen3(a="2"), [ONE, TWO], "", None),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", [ONE], "", None),
    ("qwen3_coder", qwen3(s="</tool_call> <think>"), [{"s": "</tool_call> <think>"}], "", None),
    ("qwen3_coder", f"<think>\n{qwen3(a='9')}\n</think>\n\n{qwen3(a='1')}", [ONE], "", qwen3(a="9")),
    ("qwen3_coder", f"<think>\n{qwen3(a='9')}", [], "", qwen3(a="9")),
    ("qwen3_coder", f"Hm.</think>{qwen3()}", [{}], "", "Hm."),
    ("qwen3_coder", f"{qwen3(a='1')}<think>{qwen3()}</think>{qwen3(a='2')}", [ONE, TWO], "", qwen3()),
    ("hermes", f"{HERMES % 1}<think>{HERMES % 9}</think>So.{HERMES % 2}", [ONE, TWO], "So.", HERMES % 9),
    ("hermes", f"{HERMES % 1}\n<think>\n{HERMES % 9}", [ONE], "", HERMES % 9),
    ("glm", glm(a="1") + f"<think>{glm(a='9')}", [ONE], "", glm(a="9")),
    ("glm", "\n<think>Hm.</think>\nSo:" + glm(a="1", s="1"), [{"a": 1, "s": "1"}], "So:", "Hm."),
    ("glm", glm(a="1") + "\n" + glm(a="2"), [ONE, TWO], "", None),
    ("glm", "<tool_call>f</tool_call>", [{}], "", None),
    ("glm", f"<think>{glm(a='1')}", [], "", glm(a="1")),
    ("llama3", LLAMA % '{"a": 1}', [ONE], "", None),
    ("llama3", "<|python_tag|>" + LLAMA % '{"a": 1}', [ONE], "", None),
    ("llama3", "Sure. " + LLAMA % '{"a": 1}', [ONE], "Sure.", None),
    ("llama3", LLAMA % '{"a": 1}' + "; " + LLAMA % '{"a": 2}', [ONE, TWO], "", None),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [ONE], "", None),
    ("llama3", '{"name":"f","arguments":{"a":1}}', [ONE], "", None),
    ("llama3", LLAMA % '{"s": "; {\\"name\\": \\"g\\"}"}', [{"s": '; {"name": "g"}'}], "", None),
    ("llama3", '{"answer": 3}', [], '{"answer": 3}', None),
    ("mistral", "[TOOL_CALLS] [" + MISTRAL % '{"a": 1}' + ", " + MISTRAL % '{"a": 2}' + "]", [ONE, TWO], "", None),
    ("mistral", 'So[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 2}', [ONE, TWO], "So", None),
    ("mistral", 'So[TOOL_CALLS]f{"a": 1}', [ONE], "So", None),
    ("mistral", '[THINK]f[TOOL_CALLS]f[ARGS]{"a": 9}[/THINK]No.', [], "No.", 'f[TOOL_CALLS]f[ARGS]{"a": 9}'),
    ("deepseek", "Hm.</think>So." + deepseek(V3 % '{"a": 1}', V3 % '{"a": 2}'), [ONE, TWO], "So.", "Hm."),
    ("deepseek", deepseek(V31 % '{"a": 1}'), [ONE], "", None),
    ("deepseek", "<think>" + deepseek(V31 % '{"a": 1}'), [], "", deepseek(V31 % '{"a": 1}')),
    ("gpt_oss", THOUGHT % "Hm." + OSS % '{"a": 1}', [ONE], "", "Hm."),
    ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [ONE], "", None),
    ("gpt_oss", THOUGHT % "Hm." + "<|channel|>final<|message|>Three.", [], "Three.", "Hm."),
    ("gpt_oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + OSS % "{}", [{}], "I look.", None),
    ("gpt_oss", "<|channel|>analysis<|message|>I <|start|>assistant" + OSS % "{}", [], "", None),
    ("gemma4", "<|channel>thought\nHm.<channel|>" + GEMMA, [{"a": 1, "s": 'x {a:2} "y"'}], "", "Hm."),
    ("gemma4", "Both." + GEMMA + "<|tool_call>call:f{}<tool_call|>", [{"a": 1, "s": 'x {a:2} "y"'}, {}], "Both.", None),
    ("gemma4", "<|channel>thought\n" + GEMMA, [], "", GEMMA),
    ("lfm2", f"So{LFM}[f(a=1, s='x, g(b=2)'), f()]<|tool_call_end|>", [{"a": 1, "s": "x, g(b=2)"}, {}], "So", None),
    ("lfm2", LFM + "[f(b=true, l=[1, None], o={'k': -1})]", [{"b": True, "l": [1, None], "o": {"k": -1}}], "", None),
]  # fmt: skip


@pytest.mark.parametrize("name, text, calls, content, reasoning", GOOD)
def test_what_is_read(name: str, text: str, calls: list[Any], content: str, reasoning: str | None) -> None:
    answer = FORMATS[name].read(text, TOOLS)
    assert [dict(call.arguments) for call in answer.tool_calls] == calls
    assert {call.name for call in answer.tool_calls} <= {"f"}
    assert (answer.content, answer.broken) == (content, ())
    if name != "gpt_oss" or reasoning:
        assert answer.reasoning == reasoning


def thrice(text: str, call: str, between: str = "") -> str:
    """Three calls, the second one given."""
    return between.join(text % arguments for arguments in ('{"a": 1}', call, '{"a": 2}'))


UNCLOSED = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</tool_call>"
HALF_GLM = "<tool_call>f\n<arg_key>a</arg_key>\n3\n</tool_call>"
LFM_END = "<|tool_call_end|>"
ABORTS = "f(a=__import__('os').abort())"
BROKEN = [
    ("qwen3_coder", qwen3(a="1") + UNCLOSED + qwen3(a="2"), "</function>", UNCLOSED),
    (
        "qwen3_coder",
        qwen3(a="1") + '<tool_call>{"name": "f"}</tool_call>' + qwen3(a="2"),
        "<function=NAME>",
        '<tool_call>{"name": "f"}</tool_call>',
    ),
    ("glm", glm(a="1") + HALF_GLM + glm(a="2"), "is missing", HALF_GLM),
    ("glm", glm(a="1") + "<tool_call></tool_call>" + glm(a="2"), "no name", "<tool_call></tool_call>"),
    ("llama3", thrice(LLAMA, "{'a': 3}", "; "), "Expecting", LLAMA % "{'a': 3}"),
    ("llama3", thrice(LLAMA, "[3]", "; "), "no JSON object", LLAMA % "[3]"),
    ("mistral", "[TOOL_CALLS][" + thrice(MISTRAL, "{'a': 3}", ", ") + "]", "Expecting", MISTRAL % "{'a': 3}"),
    ("mistral", f"[TOOL_CALLS][{thrice(MISTRAL, '3', ', ')}]", "no JSON object", MISTRAL % "3"),
    ("mistral", thrice("[TOOL_CALLS]f[ARGS]%s", "{a}"), "Expecting", "[TOOL_CALLS]f[ARGS]{a}"),
    ("deepseek", deepseek(thrice(V3, "{", "\n")), "Expecting", V3 % "{"),
    ("deepseek", deepseek(thrice(V31, '{"a": 3} x')), "followed by", V31 % '{"a": 3} x'),
    ("gpt_oss", thrice(OSS, '{"a": 3', "<|start|>assistant"), "Expecting", (OSS % '{"a": 3').removesuffix("<|call|>")),
    ("gemma4", thrice("<|tool_call>call:f%s<tool_call|>", "{a:"), "cannot be read", "<|tool_call>call:f{a:"),
    ("lfm2", f"{LFM}[f(a=1), f(a=__import__('os').abort()), f(a=2)]{LFM_END}", "no literal", ABORTS),
    ("lfm2", "".join(f"{LFM}[f({a})]{LFM_END}" for a in ("a=1", "a=", "a=2")), "cannot be", f"{LFM}[f(a=)]{LFM_END}"),
]  # fmt: skip


@pytest.mark.parametrize("name, text, why, kept", BROKEN)
def test_a_broken_call_is_told_and_hides_no_good_one(name: str, text: str, why: str, kept: str) -> None:
    """And stays text, so that what renders the turn again shows the policy what it wrote."""
    answer = FORMATS[name].read(text, TOOLS)
    assert [call.arguments for call in answer.tool_calls] == [ONE, TWO]
    assert len(answer.broken) == 1 and why in answer.broken[0] and len(answer.broken[0]) < 500
    assert answer.content == kept


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama3", "So <|python_tag|>print(1)"),
        ("mistral", f"So [TOOL_CALLS][{MISTRAL % 3}, {MISTRAL % 4}]"),
        ("deepseek", "So " + deepseek("f(3)")),
        ("lfm2", f"So {LFM}[f(3), f(4)]{LFM_END} it is"),
    ],
)
def test_a_block_of_which_nothing_can_be_read_stays_text_as_a_whole(name: str, text: str) -> None:
    answer = FORMATS[name].read(text, TOOLS)
    assert (answer.content, answer.tool_calls) == (text, ()) and answer.broken


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("body", ["[" * 50_000, "(" * 50_000, '{"a":' * 50_000, "-" * 50_000, "\\u0000", "'" * 9])
def test_hostile_calls_are_values(name: str, body: str) -> None:
    for text in (
        body,
        f"<tool_call>{body}",
        f"<tool_call>f<arg_key>o</arg_key><arg_value>{body}</arg_value></tool_call>",
        f"<function=f><parameter=o>{body}</parameter></function>",
        LLAMA % body,
        f"[TOOL_CALLS][{body}",
        deepseek(V31 % body),
        OSS % body,
        f"<|tool_call>call:f{{a:{body}}}",
        f"<|tool_call_start|>[f(a={body})]",
    ):
        FORMATS[name].read(text, TOOLS)


@pytest.mark.parametrize(
    "text, parameter, value",
    [
        ("1", "a", 1),
        ("1.5", "a", "1.5"),
        ("true", "a", "true"),
        ("one", "a", "one"),
        ("1e3", "x", 1000.0),
        ("2", "x", 2),
        ("Infinity", "x", "Infinity"),
        ("1", "s", "1"),
        ("True", "b", True),
        ("false", "b", False),
        ("1", "b", "1"),
        ("[1]", "l", [1]),
        ("{}", "l", "{}"),
        ('{"k": [1]}', "o", {"k": [1]}),
        ("None", "maybe", None),
        ("3", "maybe", 3),
        ("null", "either", None),
        ("3", "either", "3"),
        ("null", "gone", None),
        ("1", "one_of", "1"),
        ("1", "free", 1),
        ("word", "free", "word"),
        ("[1]", "unknown", [1]),
    ],
)
def test_values_are_cast_by_the_schema(text: str, parameter: str, value: object) -> None:
    made = cast(text, "f", parameter, TOOLS)
    assert made == value and type(made) is type(value)


def test_a_models_own_response_template_reads_its_calls() -> None:
    read = by_response_template(
        {
            "start_anchor": "<a>",
            "fields": {
                "reasoning_content": {"open": "<t>", "close": "</t>", "content": "text"},
                "tool_calls": {
                    "open_pattern": r"<call (?P<tool>\w+)>",
                    "close": "</call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\S+)"},
                    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{content}"}},
                },
                "content": {"content": "text"},
            },
        }
    )
    answer = read("<t>Hm.</t>So<call f>a=1 s=1</call>", TOOLS)
    assert (answer.reasoning, answer.content) == ("Hm.", "So")
    assert [call.arguments for call in answer.tool_calls] == [{"a": 1, "s": "1"}]
    twice = read("So<call f>a=1 a=2</call>", TOOLS)
    assert (twice.tool_calls, len(twice.broken)) == ((), 1) and "twice" in twice.broken[0]


def test_no_signs_no_format() -> None:
    assert written_by("{% for m in messages %}{{ m.content }}{% endfor %}") is None
