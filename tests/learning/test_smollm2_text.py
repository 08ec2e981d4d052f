"""The tokenizer and chat template of a real model on all published rows at hand: what is trained on, what a
conversation holds, and which calls are read, beside what transformers makes of the same messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tandem.config.data import SftDataConfig
from tandem.config.model import ChatTemplateConfig, ModelConfig
from tandem.data.sft import SftDataset
from tandem.models.loading import load_tokenizer, stop_token_ids
from tandem.rollout.formats.for_tokenizer import make_format
from tests.conftest import ROOT, load_file

MODEL = ROOT / "models/smollm2-135m-instruct"
DATA = ROOT.parent / "shared/data"
TEMPLATE = ROOT / "examples/smollm2/tools.jinja"
END = "<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
    },
}
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (MODEL / "ORIGIN.md").is_file(), reason="scripts/smollm2 makes the model"),
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the published rows are not below {DATA}"),
]
rows = load_file(ROOT / "examples/smollm2/rows.py")
Conversation = list[dict[str, Any]]


def lines(name: str) -> Iterator[dict[str, Any]]:
    path = DATA / name
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as text:
        yield from map(json.loads, text)


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    """Of GSM8K, MBPP, SQuAD, MuSiQue, HotpotQA and HH, each a question and its answer."""
    asked = [
        *(
            (row["question"], row["answer"])
            for name in ("train.jsonl.gz", "test.jsonl")
            for row in lines(f"gsm8k/{name}")
        ),
        *((row["text"], row["code"]) for row in lines("mbpp/mbpp.jsonl")),
        *((row["question"], row["answers"][0]) for row in lines("squad_search/questions.jsonl.gz")),
        *((row["question"], row["answer"]) for row in lines("multihop_search/musique_100.jsonl")),
        *((row["question"], row["answer"]) for row in lines("multihop_search/hotpotqa_100.jsonl")),
    ]
    made = [[rows.message("user", question), rows.message("assistant", answer)] for question, answer in asked]
    made += [rows.conversation(row["chosen"]) for row in lines("hh_rlhf_helpful/pairs_4000.jsonl.gz")]
    assert len(made) > 10_000
    return made


def test_what_is_trained_on_is_the_templates_text_and_what_the_assistant_says(
    conversations: list[Conversation], tmp_path: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": said}) + "\n" for said in conversations))
    dataset = SftDataset([file], tokenizer, SftDataConfig(train_files=[file], max_tokens=8192))
    assert len(dataset) == len(conversations)
    for number, said in enumerate(conversations):
        item = dataset[number]
        ids = [*item.prompt_ids.tolist(), *item.response_ids.tolist()]
        assert ids == tokenizer.apply_chat_template(said, return_dict=False), said
        parts = groupby(zip(item.response_ids.tolist(), item.loss_mask.tolist(), strict=True), key=lambda one: one[1])
        learned = [tokenizer.decode([token for token, _ in part]) for is_learned, part in parts if is_learned]
        assert learned == [f"{one['content']}{END}\n" for one in said if one["role"] == "assistant"], said


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["published", "with tools"])
def test_a_conversation_holds_turn_by_turn_what_the_template_makes_of_the_whole(
    conversations: list[Conversation], template: Path | None
) -> None:
    model = ModelConfig(path=MODEL, chat_template=None if template is None else ChatTemplateConfig(file=template))
    tokenizer: Any = load_tokenizer(model)
    form = make_format(tokenizer, stop_token_ids(model, tokenizer))
    tools = [] if template is None else [TOOL]
    for number in range(0, len(conversations) - 2, 9):
        said = [message for one in conversations[number : number + 3] for message in one]
        ids, at = form.open(said[:1], tools), 1
        while at < len(said):
            ids = [*ids, *tokenizer.encode(said[at]["content"] + END, add_special_tokens=False)]
            at += 1
            if said[at:]:
                added = form.extend(ids, said[at : at + 1], tools)
                assert added is not None
                ids, at = [*ids, *added], at + 1
        whole = tokenizer.apply_chat_template(said, tools=tools or None, return_dict=False)
        assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]).strip() == "", said


def test_calls_are_read_as_the_template_writes_them(conversations: list[Conversation]) -> None:
    model = ModelConfig(path=MODEL, chat_template=ChatTemplateConfig(file=TEMPLATE))
    tokenizer: Any = load_tokenizer(model)
    form = make_format(tokenizer, stop_token_ids(model, tokenizer))
    for asked, answered, *_ in conversations:
        arguments = {"question": asked["content"], "why": {"said": answered["content"], "times": [1, 2.5, None, True]}}
        call = {"id": "call_0", "type": "function", "function": {"name": "answer", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        begun = tokenizer.apply_chat_template([asked], tools=[TOOL], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([asked, said], tools=[TOOL], return_dict=False)
        ids = whole[len(begun) : len(whole) - whole[::-1].index(tokenizer.convert_tokens_to_ids(END))]
        answer = form.parse(begun, ids, [TOOL])
        assert [read.arguments for read in answer.tool_calls] == [arguments] and not answer.broken, asked
