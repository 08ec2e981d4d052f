"""In every format of calls: arguments arrive as they were written or not at all, and text that is no call is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tandem.rollout.environment import Answer
from tandem.rollout.formats.calls import FORMATS

few = settings(deadline=None, max_examples=25, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
TYPES = {"s": "string", "i": "integer", "x": "number", "b": "boolean", "l": "array", "o": "object"}
SCHEMA = {"properties": {key: {"type": kind} for key, kind in TYPES.items()}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "look_up")
]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else as_json(value)


def hermes(name: str, given: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{as_json({'name': name, 'arguments': given})}\n</tool_call>"


def qwen(name: str, given: Mapping[str, Any]) -> str:
    written = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name: str, given: Mapping[str, Any]) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n" for key, value in given.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def deepseek(name: str, given: Mapping[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(given)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def lfm2(name: str, given: Mapping[str, Any]) -> str:
    return f"<|tool_call_start|>[{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})]<|tool_call_end|>"


WRITERS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "deepseek": deepseek,
    "gemma4": lambda name, given: f"<|tool_call>call:{name}{gemma(given)}<tool_call|>",
    "glm": glm,
    "gpt_oss": lambda name, given: f"<|channel|>commentary to=functions.{name} json<|message|>{as_json(given)}<|call|>",
    "hermes": hermes,
    "lfm2": lfm2,
    "llama3": lambda name, given: as_json({"name": name, "parameters": given}),
    "mistral": lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}",
    "qwen3_coder": qwen,
}
texts = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=6),
        st.sampled_from(["\n", "  ", "{", "}", '"', "'", "\\", "</", "#", '{"name": "f", "parameters": {}}', ", b=1"]),
    ),
    max_size=5,
).map("".join)
numbers = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False))
inner = st.recursive(
    st.one_of(texts, numbers, st.booleans(), st.none()),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["k", "name"]), values),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": texts,
        "i": st.integers(-(10**20), 10**20),
        "x": numbers,
        "b": st.booleans(),
        "l": st.lists(inner, max_size=3),
        "o": st.dictionaries(st.sampled_from(["k", "name"]), inner),
    },
)


def read(name: str, text: str) -> Answer:
    return FORMATS[name].read(text, TOOLS)


def called(answer: Answer) -> list[tuple[str, str]]:
    """True is not 1 in JSON."""
    return [(call.name, json.dumps(call.arguments)) for call in answer.tool_calls]


def test_all_formats_are_tried() -> None:
    """Here, or in a file of the format's own."""
    assert WRITERS.keys() <= FORMATS.keys()
    elsewhere = {path.stem.removeprefix("test_formats_") for path in Path(__file__).parent.glob("test_formats_*.py")}
    assert FORMATS.keys() - WRITERS.keys() <= elsewhere


@pytest.mark.parametrize("name", WRITERS)
@few
@given(one=arguments, other=arguments)
def test_what_is_written_is_read(name: str, one: Any, other: Any) -> None:
    between = "; " if name == "llama3" else "<|start|>assistant" if name == "gpt_oss" else "\n"
    answer = read(name, WRITERS[name]("f", one) + between + WRITERS[name]("look_up", other))
    assert called(answer) == [("f", json.dumps(one)), ("look_up", json.dumps(other))]
    assert answer.broken == ()


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_runs_whole_or_not_at_all(name: str) -> None:
    """Behind its mark it is told wherever it ends; llama3's mark is the tool's name."""
    whole = {"s": "one two", "i": 12, "l": [1, "x"], "o": {"k": None}}
    written = WRITERS[name]("look_up", whole)
    mark = "look_up"
    for length in range(len(written) + 1):
        answer = read(name, written[:length])
        assert called(answer) in ([], [("look_up", json.dumps(whole))])
        if length > written.index(mark) + len(mark) + 1:
            assert len(answer.tool_calls) + len(answer.broken) == 1, written[:length]


JSON_FORMATS: dict[str, str] = {"hermes": "<tool_call>%s</tool_call>", "llama3": "%s", "mistral": "[TOOL_CALLS][%s]"}
"""Those whose calls are JSON objects with a name."""
FULL = [
    '{"name": "f", "arguments": %s}',
    '{"name": "f", "parameters": %s}',
    '{"name": "f", "args": %s}',
    '{"arguments": %s, "name": "f"}',
    '{"name": "f", "arguments": {}, "parameters": %s}',
    '{"name": "f", "arguments": null, "args": %s}',
    '{"type": "function", "id": "call00001", "function": {"name": "f", "arguments": %s}}',
    '{"function": {"name": "f"}, "parameters": %s}',
    '{"function": "f", "parameters": %s}',
    '{\n  "name": "f",\n  "arguments": %s\n}',
]
EMPTY = [
    '{"name": "f"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "parameters": ""}',
    '{"name": "f", "args": {}}',
]
LOSSY = [
    ('{"name": "f", "a": 1}', "'a' beside its name"),
    ('{"name": "f", "arguments": {"a": 1}, "b": 2}', "'b' beside its name"),
    ('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}', "stand under arguments and parameters"),
    ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' stands twice"),
    ('{"name": "f", "arguments": {"o": {"a": 1, "a": 2}}}', "'a' stands twice"),
    ('{"name": "f", "function": {"name": "f", "arguments": {}}}', "'name' inside and outside of 'function'"),
    ('{"name": "f", "arguments": [1]}', "no JSON object"),
    ('{"name": "f", "arguments": "\\"{}\\""}', "no JSON object"),
    ('{"name": "f", "parameters": 1}', "its parameters are no JSON object"),
    ('{"name": "f", "arguments": {"a": 1,}}', "its JSON cannot be read"),
    ("{'name': 'f', 'arguments': {'a': 1}}", "its JSON cannot be read"),
    ('{"name": "f", "arguments": {"a": 1}', "its JSON cannot be read"),
    ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
    ('{"name": "f", "arguments": {a: 1}}', "its JSON cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("call", FULL)
@few
@given(made=arguments)
def test_arguments_are_found_under_each_key(name: str, call: str, made: Any) -> None:
    for written in (as_json(made), json.dumps(made), as_json(json.dumps(made)), json.dumps(made, indent=2)):
        answer = read(name, JSON_FORMATS[name] % (call % written))
        assert called(answer) == [("f", json.dumps(made))] and answer.broken == () and answer.content == ""


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("call", EMPTY)
def test_a_call_may_have_no_arguments(name: str, call: str) -> None:
    assert called(read(name, JSON_FORMATS[name] % call)) == [("f", "{}")]


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(("call", "why"), LOSSY)
def test_a_call_of_which_something_would_be_lost_is_told(name: str, call: str, why: str) -> None:
    text = JSON_FORMATS[name] % call
    answer = read(name, text)
    assert answer.tool_calls == () and len(answer.broken) == 1 and why in answer.broken[0]
    assert answer.content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=f><parameter=s>a</parameter><parameter=s>b</parameter></function>"),
        ("glm", f"<tool_call>f{2 * '<arg_key>s</arg_key><arg_value>a</arg_value>'}</tool_call>"),
        ("lfm2", "<|tool_call_start|>[f(s='a', s='b')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(o={'k': 1, 'k': 2})]<|tool_call_end|>"),
        ("gemma4", '<|tool_call>call:f{s:<|"|>a<|"|>,s:<|"|>b:<|"|>}<tool_call|>'),
        ("gemma4", '<|tool_call>call:f{o:{"k":1,"k":2}}<tool_call|>'),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": 1, \"s\": 2}<｜tool▁call▁end｜>"),
    ],
)  # fmt: skip
def test_an_argument_that_is_given_twice_is_told(name: str, text: str) -> None:
    answer = read(name, text)
    assert answer.tool_calls == () and len(answer.broken) == 1 and "twice" in answer.broken[0]


def test_line_feeds_may_stand_in_a_text_of_json() -> None:
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x = 1\n\ty = \'é\'"}}</tool_call>')
    assert called(answer) == [("f", json.dumps({"s": "x = 1\n\ty = 'é'"}))]


NO_CALLS = [
    "No call.",
    '{"name": "Alice", "parameters": {"age": 3}}',
    'Her record: {"name": "Alice", "arguments": {"age": 3}}.',
    '[{"name": "Alice"}, {"name": "Bob"}]',
    '```json\n{"name": "Alice", "parameters": {}}\n```',
    '{"answer": {"name": "f", "parameters": {}}}',
    '{"people": [{"name": "f"}]}',
    '{"answer": {"name": "f", "parameters": {}}, ',
    '{"name": "Alice", "parameters": {"age": 3',
    r"\frac{1}{2} of {'name': 'Alice'}",
    "f(s='x'), and f is called.",
    '{"names": ["f"], "function": 3}',
]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("text", NO_CALLS)
def test_text_that_is_no_call_stays_text(name: str, text: str) -> None:
    answer = read(name, text)
    assert (answer.content, answer.tool_calls, answer.broken) == (text.strip(), (), ())


def test_without_tools_json_is_text_and_tags_are_calls() -> None:
    assert FORMATS["llama3"].read(WRITERS["llama3"]("f", {}), []).tool_calls == ()
    for name in WRITERS.keys() - {"llama3"}:
        assert [call.name for call in FORMATS[name].read(WRITERS[name]("f", {}), []).tool_calls] == ["f"], name


@pytest.mark.parametrize("name", WRITERS)
def test_a_mark_makes_a_call_of_whatever_name(name: str) -> None:
    """Whoever runs calls says that there is no such tool."""
    written = ("<|python_tag|>" if name == "llama3" else "") + WRITERS[name]("nowhere", {"s": "x"})
    assert called(read(name, written)) == [("nowhere", '{"s": "x"}')]


@pytest.mark.parametrize("name", WRITERS)
def test_a_code_block_makes_no_difference(name: str) -> None:
    answer = read(name, f"```\n{WRITERS[name]('f', {'s': 'x'})}\n```")
    assert called(answer) == [("f", '{"s": "x"}')] and answer.broken == ()


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"gpt_oss", "mistral", "gemma4"}))
@pytest.mark.parametrize("end", ["</think>", ""])
def test_a_call_in_a_thought_is_none(name: str, end: str) -> None:
    call = WRITERS[name]("f", {"s": "x"})
    answer = read(name, f"<think>I do {call}{end}")
    assert (answer.tool_calls, answer.broken, answer.content) == ((), (), "")
    assert answer.reasoning == f"I do {call}"
    again = read(name, f"<think>I do {call}</think>{WRITERS[name]('look_up', {})}")
    assert called(again) == [("look_up", "{}")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm"])
def test_a_thought_behind_a_broken_call_is_one(name: str) -> None:
    broken, call = "<tool_call>{</tool_call>", WRITERS[name]("f", {})
    answer = read(name, f"{broken}<think>{call}</think>{WRITERS[name]('look_up', {})}")
    assert called(answer) == [("look_up", "{}")] and len(answer.broken) == 1 and answer.reasoning == call


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "f", "arguments": {"i": 1}}, {"name": "look_up", "args": {"i": 2}}]',
        '{"name": "f", "arguments": {"i": 1}}\n{"name": "look_up", "arguments": {"i": 2}}',
        '{"name": "f", "arguments": {"i": 1}}, {"name": "look_up", "arguments": {"i": 2}}',
    ],
)
@pytest.mark.parametrize("name", JSON_FORMATS)
def test_several_calls_in_one_pair_of_tags_all_run(name: str, text: str) -> None:
    if name == "llama3":
        assert called(read(name, f"<|python_tag|>{text}")) == called(read(name, text))
    if name == "mistral":
        text = text if text.startswith("[") else f"[{text}]"
        answer = read(name, f"[TOOL_CALLS]{text}")
    else:
        answer = read(name, JSON_FORMATS[name] % text)
    assert called(answer) == [("f", '{"i": 1}'), ("look_up", '{"i": 2}')] and answer.broken == ()


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_broken_call_in_a_list_hides_no_good_one(name: str) -> None:
    opening, closing = ("<tool_call>", "") if name == "hermes" else ("[TOOL_CALLS]", "")
    for second in ('{"name": "look_up", "argu', '{"name": "look_up", "arguments": 3}]'):
        answer = read(name, f'{opening}[{{"name": "f", "arguments": {{"i": 1}}}}, {second}{closing}')
        assert called(answer) == [("f", '{"i": 1}')] and len(answer.broken) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>[]</tool_call>"),
        ("mistral", "[TOOL_CALLS][]"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("gpt_oss", "<|channel|>commentary to=functions.f json<|message|>"),
        ("gpt_oss", "<|channel|>commentary to=functions.f"),
        ("gpt_oss", " to=functions.f<|channel|>comm"),
        ("deepseek", "<｜tool▁call▁begin｜>f"),
        ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm", '<tool_call>{"name":"f"}</tool_call>'),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>'),
        ("gemma4", "<|tool_call>{a:1}<tool_call|>"),
        ("llama3", "<|python_tag|>f(1)"),
    ],
)
def test_a_mark_without_a_call_is_told(name: str, text: str) -> None:
    answer = read(name, text)
    assert answer.tool_calls == () and len(answer.broken) == 1


def test_what_is_said_behind_calls_is_kept() -> None:
    assert read("mistral", '[TOOL_CALLS]f[ARGS]{"i": 1} Done.').content == "Done."
    assert read("deepseek", f"So.{deepseek('f', {})}Done.").content == "So.Done."
    assert read("mistral", '[TOOL_CALLS][{"name": "f"}] Done.').content == "Done."
    assert read("hermes", f"So.{hermes('f', {})}Done.").content == "So.Done."
