"""Messages, tools and calls in the forms of published data sets: read as what they mean, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import char_tokenizer, write_lines
from published_templates import needs_trl, with_template

from tandem.config.data import DataConfig, SftDataConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.preference import PreferenceDataset
from tandem.data.sft import SftDataset
from tandem.errors import UserError

TEMPLATE = (
    "{% if tools %}<|start|>tools {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOKENIZER = char_tokenizer(TEMPLATE)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def call(arguments: Any = None, **changed: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"x": 1} if arguments is None else arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}], **changed}


def load(kind: Any, path: Path, row: Any, tokenizer: Any = TOKENIZER) -> Any:
    """The item of the only row, which is in a parquet file where `path` says so."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        write_lines(path, [row])
    config: Any = DataConfig() if kind is RLHFDataset else SftDataConfig()
    return kind([path], tokenizer, config)[0]


def texts(item: Any, tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """Of a demonstration: the prompt, and what is learned."""

    def text(ids: Any) -> str:
        one_a_character = tokenizer is TOKENIZER
        return "".join(tokenizer.convert_ids_to_tokens(ids)) if one_a_character else tokenizer.decode(ids)

    return text(item.prompt_ids.tolist()), text(item.response_ids[item.loss_mask].tolist())


def refused(kind: Any, path: Path, row: Any, told: str, tokenizer: Any = TOKENIZER) -> None:
    with pytest.raises(UserError, match=rf"row 1: .*{told}"):
        load(kind, path, row, tokenizer)


@pytest.mark.parametrize("spaced", ["{}", " \n{} "])
def test_messages_as_json_text_are_messages(spaced: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    as_text = spaced.format(json.dumps([USER]))
    asked = load(RLHFDataset, path, {"prompt": as_text, "answer": "5"})
    assert asked.text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n" and asked.row["prompt"] == [USER]
    taught = load(SftDataset, path, {"messages": json.dumps([USER, ANSWER])})
    assert texts(taught)[1] == texts(load(SftDataset, path, {"messages": [USER, ANSWER]}))[1]
    pair = {
        "prompt": as_text,
        "chosen": json.dumps([ANSWER]),
        "rejected": json.dumps([USER | ANSWER | {"content": "no"}]),
    }
    assert texts(load(PreferenceDataset, path, pair).chosen) == texts(taught)
    named = json.dumps([{"id": 1, "content": "hi", "role": "user"}])
    assert load(RLHFDataset, path, {"prompt": named}).text == asked.text


@pytest.mark.parametrize("text", ["[1, 2] = ", '[{"a": 1}, {"b": 2}]', '[{"a": 1}', '{"a": 1}', "[]", "[{}]"])
def test_other_json_is_text(text: str, tmp_path: Path) -> None:
    assert load(RLHFDataset, tmp_path / "rows.jsonl", {"prompt": text}).text == text


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (str([USER]), "column `prompt` holds messages as Python prints them"),
        (json.dumps(USER), "column `prompt` holds one message as JSON text"),
        (json.dumps([USER])[:-3], "column `prompt`, which seems to be messages, is no valid JSON"),
        (json.dumps([{"from": "human", "value": "hi"}]), "message 1 has `from` and `value`; write `role`"),
    ],
)
def test_what_is_nearly_messages_is_not_asked_as_text(prompt: str, told: str, tmp_path: Path) -> None:
    refused(RLHFDataset, tmp_path / "rows.jsonl", {"prompt": prompt}, told)


def test_pictures_as_json_text_are_a_list(tmp_path: Path) -> None:
    row = {"prompt": [USER], "images": '["a.png", "b.png"]'}
    refused(RLHFDataset, tmp_path / "rows.jsonl", row, "no store was given for them")
    refused(RLHFDataset, tmp_path / "rows.jsonl", row | {"images": "[a.png"}, "column `images` is no valid JSON")


def test_nulls_of_merged_structs_are_absent(tmp_path: Path) -> None:
    """Parquet gives every call the arguments of all, and every schema the keys of all."""
    other = {"id": "d", "function": {"name": "say", "arguments": {"words": ["a", None]}}}
    calls = call()["tool_calls"] + [other]
    tools = [
        ADD,
        {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "required": ["w"]}}},
    ]
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}], "tools": tools}
    prompt, learned = texts(load(SftDataset, tmp_path / "rows.parquet", row))
    assert learned == ' add{"x": 1} say{"words": ["a", null]}<|end|>\n'
    assert prompt.startswith(f"<|start|>tools {json.dumps(tools[:1])[:-1]}, ") and "null" not in prompt


def test_a_null_that_json_says_is_a_value(tmp_path: Path) -> None:
    taught = load(SftDataset, tmp_path / "rows.jsonl", {"messages": [USER, call('{"x": null}')]})
    assert texts(taught)[1] == ' add{"x": null}<|end|>\n'


@pytest.mark.parametrize(
    "answer",
    [
        call(),
        call('{"x": 1}'),
        call(content=""),
        call(tool_calls=json.dumps(call()["tool_calls"])),
        call(tool_calls=[{"name": "add", "arguments": '{"x": 1}'}]),
        call(tool_calls=[{"name": "add", "parameters": {"x": 1}}]),
    ],
)
def test_a_demonstration_may_end_in_a_call(answer: Any, tmp_path: Path) -> None:
    for row in ({"messages": [USER, answer]}, {"prompt": [USER], "completion": [answer]}):
        assert texts(load(SftDataset, tmp_path / "rows.jsonl", row))[1] == ' add{"x": 1}<|end|>\n'


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD]), [json.dumps(ADD)]])
def test_tools_of_a_demonstration_are_shown(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"messages": [USER, call(), {"role": "tool", "content": "2"}, {**ANSWER, "tool_calls": []}], "tools": tools}
    prompt, learned = texts(load(SftDataset, path, row))
    assert prompt.startswith(f"<|start|>tools {json.dumps([ADD])}<|end|>")
    assert learned == ' add{"x": 1}<|end|>\nyes<|end|>\n'
    pair = {"prompt": [USER], "chosen": [call()], "rejected": [ANSWER], "tools": tools}
    assert texts(load(PreferenceDataset, path, pair).chosen)[0] == prompt


CALLED = [USER, call()]
BAD: list[tuple[Any, str]] = [
    ({"messages": CALLED, "tools": "add"}, "column `tools` is no valid JSON"),
    ({"messages": CALLED, "tools": [{"a": 1}]}, "column `tools`: entry 1 is no description of a function"),
    ({"messages": CALLED, "tools": {"name": "add"}}, "column `tools` has the wrong type: an object"),
    ({"prompt": "a", "completion": "b", "tools": [ADD]}, "column `tools` needs messages"),
    ({"messages": [USER, call("{x: 1}")]}, "the text of `arguments` of the call of add is no valid JSON"),
    ({"messages": [USER, call("[1]")]}, "`arguments` of the call of add are not an object"),
    ({"messages": [USER, call(tool_calls=[{"id": "c"}])]}, "a call is not {function: {name, arguments}}"),
    ({"messages": [USER | {"tool_calls": call()["tool_calls"]}, ANSWER]}, "of role user has `tool_calls`"),
    ({"messages": [USER, ANSWER | {"content": None}]}, "message 2 is not {role, content} of text"),
    ({"messages": [USER, ANSWER | {"function_call": {"name": "f"}}]}, "the key `function_call`, which is not read"),
    ({"messages": [USER, ANSWER | {"mask": 0}]}, "the key `mask`; write `weight`"),
    ({"messages": [USER, ANSWER | {"no_loss": True}]}, "the key `no_loss`; write `weight`"),
    ({"messages": [USER, ANSWER | {"train_detail": [{"begin_offset": 0}]}]}, "the key `train_detail`"),
    ({"messages": [{"role": " ", "content": "hi"}, ANSWER]}, "message 1 is not {role, content} of text"),
    ({"messages": [{"from": "human", "value": "hi"}, ANSWER]}, "message 1 has `from` and `value`"),
    ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "message 2: `weight` is 0.5; a turn is learned .* or not"),
    ({"messages": [USER | {"train": True}, ANSWER]}, "message 1: `train` is True; only turns of the assistant"),
    ({"messages": [USER, ANSWER | {"loss": False}]}, "no turn of the assistant is to be learned"),
    ({"messages": [USER, ANSWER | {"reasoning_content": "hm"}]}, "leaves out `reasoning_content` of message 2"),
    ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "`prompt` ends in a message of the assistant"),
]


@pytest.mark.parametrize(("row", "told"), BAD)
def test_what_cannot_be_learned_as_it_is_meant_is_refused(row: Any, told: str, tmp_path: Path) -> None:
    refused(SftDataset, tmp_path / "rows.jsonl", row, told)


def test_prompts_do_not_end_in_an_answer(tmp_path: Path) -> None:
    refused(RLHFDataset, tmp_path / "rows.jsonl", {"prompt": [USER, ANSWER]}, "ends in a message of the assistant")


@pytest.mark.parametrize(
    "key",
    [
        "weight",
        "loss",
        "loss_scale",
        "loss_mask",
        "train",
        "training",
        "train_on_turn",
        "trainable",
        "supervised",
        "learn",
    ],
)
@pytest.mark.parametrize("no", [0, False, 0.0])
def test_turns_that_are_not_to_be_learned_are_not(key: str, no: Any, tmp_path: Path) -> None:
    first, last = ANSWER | {"content": "one", key: no}, ANSWER | {"content": "two", key: 1}
    taught = load(SftDataset, tmp_path / "rows.jsonl", {"messages": [USER | {key: no}, first, USER, last]})
    prompt, learned = texts(taught)
    assert learned == "two<|end|>\n" and prompt.count("hi") == 2 and "one" in prompt


@needs_trl
@pytest.mark.parametrize(
    ("name", "key"), [("qwen3", "thinking"), ("gptoss", "reasoning_content"), ("glm4moe", "reasoning")]
)
def test_what_was_thought_is_learned_whatever_its_key(name: str, key: str, tmp_path: Path) -> None:
    tokenizer = with_template(name)
    for row in (
        {"messages": [USER, ANSWER | {key: "Hmm."}]},
        {"prompt": [USER], "completion": [ANSWER | {key: "Hmm."}]},
    ):
        assert "Hmm." in texts(load(SftDataset, tmp_path / "rows.jsonl", row, tokenizer), tokenizer)[1]


def test_templates_that_take_arguments_as_text_get_text(tmp_path: Path) -> None:
    """As DeepSeek's does, which puts them together with `+`."""
    tokenizer: Any = char_tokenizer(TEMPLATE.replace("c.function.arguments | tojson", "c.function.arguments + ''"))
    taught = load(SftDataset, tmp_path / "rows.jsonl", {"messages": [USER, call()]}, tokenizer)
    assert texts(taught)[1] == ' add{"x": 1}<|end|>\n'


def test_a_template_of_one_tool_need_not_name_it(tmp_path: Path) -> None:
    tokenizer: Any = char_tokenizer(TEMPLATE.replace("{{ c.function.name }}", ""))
    taught = load(SftDataset, tmp_path / "rows.jsonl", {"messages": [USER, call()]}, tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(taught.response_ids.tolist())) == ' {"x": 1}<|end|>\n'


@needs_trl
def test_templates_that_do_not_show_what_is_learned_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    refused(SftDataset, path, {"messages": [USER, ANSWER | {"thinking": "t"}]}, "`thinking`", with_template("llama3_1"))
    refused(SftDataset, path, {"messages": CALLED}, "leaves out the calls of tools in message 2", with_template("lfm2"))
    row = {"messages": [USER, call(content="Let me see.")]}
    refused(SftDataset, path, row, "what message 2 says beside its calls of tools", with_template("llama3_1"))
    refused(SftDataset, path, {"messages": [USER, ANSWER], "tools": [ADD]}, "not show `tools`", with_template("phi3"))


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "glm4moe", "gptoss", "gemma4"])
def test_calls_are_learned_as_each_template_writes_them(name: str, tmp_path: Path) -> None:
    tokenizer = with_template(name)
    row = {"messages": [USER, call(), {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"}, ANSWER]}
    path = write_lines(tmp_path / "rows.jsonl", [row])
    data = SftDataset([path], tokenizer, SftDataConfig())
    learned = "".join(texts(data[number], tokenizer)[1] for number in range(len(data)))
    assert "add" in learned and "1" in learned and "yes" in learned
