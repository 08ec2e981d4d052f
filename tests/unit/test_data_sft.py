"""Rows to imitate -> Demonstration: what is prompt, what is learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizer import CHAT_TEMPLATE, char_tokenizer, write_lines
from published_templates import names, needs_trl, stops_of, with_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.tree import SftConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.jobs.inputs import Inputs, state_of_rows, tell_changed_rows
from tandem.jobs.notes import endless_note
from tandem.types import Demonstration

TOKENIZER = char_tokenizer()
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "hi"}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def load(tmp_path: Path, rows: list[Any], tokenizer: Any = TOKENIZER, **options: Any) -> SftDataset:
    path = write_lines(tmp_path / "rows.jsonl", rows)
    return SftDataset([path], tokenizer, SftDataConfig(train_files=[path], **options))


def ids(*parts: str) -> list[int]:
    """A part that is a special token counts as one token, any other as its characters."""
    pieces = [piece for part in parts for piece in ([part] if part.startswith("<") else part)]
    return TOKENIZER.convert_tokens_to_ids(pieces)


def check(found: Demonstration, prompt: list[int], *runs: tuple[list[int], bool]) -> None:
    assert found.prompt_ids.tolist() == prompt and found.prompt_ids.dtype == np.int32
    assert found.response_ids.tolist() == [token for run, _ in runs for token in run]
    assert found.response_ids.dtype == np.int32 and found.loss_mask.dtype == np.bool_
    assert found.loss_mask.tolist() == [learned for run, learned in runs for _ in run]


def test_the_loss_is_on_every_assistant_turn_and_its_end(tmp_path: Path) -> None:
    row = {"messages": [SYSTEM, USER, assistant("yes"), {"role": "user", "content": "so"}, assistant("no")]}
    dataset = load(tmp_path, [row])
    asked = ids("<|start|>", "system\ns", "<|end|>", "\n", "<|start|>", "user\nhi", "<|end|>", "\n")
    check(
        dataset[0],
        [*asked, *ids("<|start|>", "assistant\n")],
        (ids("yes", "<|end|>", "\n"), True),
        (ids("<|start|>", "user\nso", "<|end|>", "\n", "<|start|>", "assistant\n"), False),
        (ids("no", "<|end|>", "\n"), True),
    )
    assert dataset.descriptions == ["rows.jsonl: 1 `messages` rows; 0 skipped"]


def test_messages_after_the_last_answer_are_not_learned(tmp_path: Path) -> None:
    found = load(tmp_path, [{"messages": [USER, assistant("a"), USER]}])[0]
    assert found.loss_mask.tolist() == [True] * 3 + [False] * (len(found.loss_mask) - 3)


def test_only_the_completion_of_a_prompt_of_messages_is_learned(tmp_path: Path) -> None:
    row = {"prompt": [USER, assistant("a"), USER], "completion": [assistant("b")]}
    asked = ids("<|start|>", "user\nhi", "<|end|>", "\n")
    told = ids("<|start|>", "assistant\na", "<|end|>", "\n")
    prompt = [*asked, *told, *asked, *ids("<|start|>", "assistant\n")]
    check(load(tmp_path, [row])[0], prompt, (ids("b", "<|end|>", "\n"), True))


def test_strings_are_tokenised_apart_and_end_with_eos_once(tmp_path: Path) -> None:
    rows = [{"prompt": "12=", "completion": "21"}, {"prompt": "12=", "completion": "21<eos>"}]
    dataset = load(tmp_path, rows)
    for found in (dataset[0], dataset[1]):
        check(found, ids("12="), (ids("21", "<eos>"), True))
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    check(load(tmp_path, rows, tokenizer)[0], ids("12="), (ids("21"), True))


def test_prompts_are_the_ones_that_reinforcement_learning_asks(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(around="<bos> $A <eos>")
    rows = [
        {"prompt": "12=", "completion": "21"},
        {"prompt": [SYSTEM, USER], "completion": [assistant("a")]},
        {"prompt": [USER], "messages": [USER, assistant("a")]},
    ]
    taught = load(tmp_path, rows, tokenizer)
    asked = RLHFDataset([tmp_path / "rows.jsonl"], tokenizer, DataConfig())
    for index in range(3):
        assert taught[index].prompt_ids.tolist() == asked[index].token_ids.tolist()
    assert taught[0].prompt_ids[0] == tokenizer.bos_token_id
    assert taught[0].response_ids.tolist() == ids("21", "<eos>")


def byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with ` yes` and a line break before `yes` as merges, as in byte-level tokenizers of real models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("Ġ", "yes")]
    tokens = ["<|start|>", "<|end|>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<|start|>", "<|end|>"], eos_token="<|end|>"
    )
    result.chat_template = CHAT_TEMPLATE
    return result


def test_masks_hold_with_tokens_of_many_characters_and_characters_of_many_tokens(tmp_path: Path) -> None:
    tokenizer = byte_pair_tokenizer()
    row = {"messages": [{"role": "user", "content": "yes 日?"}, assistant("日 yes yes")]}
    found = load(tmp_path, [row], tokenizer)[0]
    assert found.loss_mask.all()
    assert tokenizer.decode(found.prompt_ids.tolist()) == "<|start|>user\nyes 日?<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(found.response_ids.tolist()) == "日 yes yes<|end|>\n"
    assert len(found.response_ids) == 3 + 1 + 1 + 1 + 1  # three bytes, two ` yes`, the end, the line break


@pytest.mark.parametrize("blank", ["\n", "  ", " \n\n"])
def test_an_answer_of_whitespace_alone_is_learned(tmp_path: Path, blank: str) -> None:
    """Plain text is read as it stands, as TRL reads it: the model is to write a line break, say, and to end."""
    row = {"prompt": "12=", "completion": blank}
    check(load(tmp_path, [row])[0], ids("12="), (ids(blank, "<eos>"), True))


FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
)
"""Shows thoughts in the last answer only, so the first answer looks different once there is a second."""
ESTRANGED = CHAT_TEMPLATE.replace("<|start|>assistant\n", "<|start|>bot\n")
"""Asks for an answer in other words than it shows answers in."""


def test_a_turn_that_is_shown_otherwise_later_is_a_demonstration_of_its_own(tmp_path: Path) -> None:
    row = {"messages": [USER, assistant("a"), USER, assistant("b"), USER]}
    dataset = load(tmp_path, [row, {"prompt": "1", "completion": "2"}], char_tokenizer(FORGETFUL))
    asked, answers = ids("<|start|>", "user\nhi", "<|end|>", "\n"), ids("<|start|>", "assistant\n")
    check(dataset[0], [*asked, *answers], (ids(*"<think>", "a", "<|end|>", "\n"), True))
    prompt = [*asked, *answers, *ids("a", "<|end|>", "\n"), *asked, *answers]
    check(dataset[1], prompt, (ids(*"<think>", "b", "<|end|>", "\n"), True))
    assert len(dataset) == 3 and [dataset[number].index for number in range(3)] == [0, 1, 2]


BAD_ROWS = [
    ({"prompt": "a"}, "column `completion` is missing; the row has prompt", CHAT_TEMPLATE),
    ({"completion": "a"}, "column `prompt` is missing", CHAT_TEMPLATE),
    ({"prompt": "", "completion": "a"}, "column `prompt` is empty", CHAT_TEMPLATE),
    ({"prompt": "a", "completion": ""}, "column `completion` is empty", CHAT_TEMPLATE),
    ({"prompt": " ", "completion": "a"}, "column `prompt` holds only whitespace: ' '", CHAT_TEMPLATE),
    ({"messages": [USER, assistant("\n")]}, "column `messages`: its last message holds only whitespace", CHAT_TEMPLATE),
    (
        {"prompt": "a", "completion": [assistant("b")]},
        "column `completion` has the wrong type: a list, not text",
        CHAT_TEMPLATE,
    ),
    ({"prompt": [USER], "completion": "b"}, "column `completion` has the wrong type: text, not a list", CHAT_TEMPLATE),
    ({"prompt": [USER], "completion": [USER]}, "no assistant turn after the prompt", CHAT_TEMPLATE),
    ({"messages": "a"}, "column `messages` has the wrong type: text, not a list", CHAT_TEMPLATE),
    (
        {"messages": [USER, {"role": "gpt", "content": "a"}]},
        "message 2 has the role 'gpt', .*; write assistant$",
        CHAT_TEMPLATE,
    ),
    ({"prompt": "a", "completion": None}, "column `completion` is null; the row has prompt$", CHAT_TEMPLATE),
    ({"messages": [USER]}, "no assistant turn after the prompt", CHAT_TEMPLATE),
    ({"messages": [assistant("a"), USER]}, "no assistant turn after the prompt", CHAT_TEMPLATE),
    ({"messages": [USER, SYSTEM, assistant("a")]}, "refused by the chat template", CHAT_TEMPLATE),
    ({"messages": [USER, assistant("a")], "images": ["x"]}, "no store was given for them", CHAT_TEMPLATE),
    ({"prompt": "a" * 20, "completion": "b" * 20}, "the row is 41 tokens long; data.max_tokens is 40", CHAT_TEMPLATE),
    ({"prompt": "a" * 10**5, "completion": "b"}, "the row is more than 1,184 tokens long; data.max", CHAT_TEMPLATE),
    ({"prompt": "a", "completion": "b" * 10**5}, "the row is more than 1,184 tokens long; data.max", CHAT_TEMPLATE),
    ({"messages": [USER, assistant("a" * 10**5)]}, "the row is more than 1,[0-9]+ tokens long", CHAT_TEMPLATE),
    ({"messages": [USER, assistant("a")]}, "cannot be split into turns by this chat template", ESTRANGED),
]


@pytest.mark.parametrize(("row", "reason", "template"), BAD_ROWS)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, row: Any, reason: str, template: str) -> None:
    rows, tokenizer = [{"prompt": "a", "completion": "b"}, row], char_tokenizer(template)
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 2: .*{reason}"):
        load(tmp_path, rows, tokenizer, max_tokens=40)
    dataset = load(tmp_path, rows, tokenizer, max_tokens=40, on_bad_row="skip")
    assert (len(dataset), dataset.skipped) == (1, 1)


def test_messages_without_a_chat_template_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        load(tmp_path, [{"messages": [USER, assistant("a")]}], char_tokenizer(None), on_bad_row="skip")


def test_the_form_of_demonstrations_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"messages": [USER, assistant("yo")]}]
    assert [form.split(":")[0] for form in load(tmp_path, rows).forms] == [
        "TRL's prompts with completions", "TRL's conversations",
    ]  # fmt: skip


REFUSE = ("deepseek_r1_distill", "deepseekv3", "idefics3", "llava_next", "nemotron_3", "smolvlm")
"""Published templates that take no rows of text without thoughts, and say so."""
TALK = [{"role": "user", "content": "Hi"}, assistant("Hello"), {"role": "user", "content": "2+2?"}, assistant("4")]


def with_ends(name: str, folder: Path) -> Any:
    """A published template's tokenizer in a model directory that names what ends answers."""
    tokenizer = with_template(name)
    tokenizer.eos_token = stops_of(name)[0]
    ends = tokenizer.convert_tokens_to_ids(stops_of(name))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.name_or_path = str(folder)
    return tokenizer


@needs_trl
@pytest.mark.parametrize("name", [name for name in names() if not name.startswith(REFUSE)])
@pytest.mark.parametrize("messages", [TALK[:2], TALK])
def test_every_turn_that_is_learned_ends_in_a_token_that_ends_answers(
    name: str, messages: list[Any], tmp_path: Path
) -> None:
    tokenizer = with_ends(name, tmp_path)
    ends = set(tokenizer.convert_tokens_to_ids(stops_of(name)))
    found = load(tmp_path, [{"messages": messages}], tokenizer, max_tokens=2000)
    turns = 0
    for one in (found[item] for item in range(len(found))):
        mask = np.concatenate(([False], one.loss_mask, [False])).astype(np.int8)
        for begin, end in zip(*(np.flatnonzero(np.diff(mask) == side) for side in (1, -1)), strict=True):
            turns += 1
            assert ends & set(one.response_ids[begin:end].tolist()), tokenizer.decode(one.response_ids[begin:end])
    assert turns == len(messages) // 2


@needs_trl
def test_what_ends_a_turn_may_be_what_the_next_message_begins_with(tmp_path: Path) -> None:
    """GLM-4.5: a user's turn or a tool's answer; what follows in the row is learned, and added where nothing does."""
    tokenizer = with_ends("glm4moe", tmp_path)
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    calls = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*calls, {"role": "tool", "content": "12:00"}, assistant("Noon")]
    found = load(
        tmp_path, [{"messages": TALK}, {"messages": calls}, {"messages": answered}], tokenizer, max_tokens=1000
    )
    learned = [tokenizer.decode(one.response_ids[one.loss_mask]) for one in (found[row] for row in range(len(found)))]
    assert [text.count("<|user|>") for text in learned] == [2, 0, 1]
    assert [text.count("<|observation|>") for text in learned] == [0, 1, 1]
    assert learned[1].endswith("<|observation|>") and learned[2].endswith("Noon<|user|>")


@needs_trl
def test_a_turn_that_is_not_shown_as_it_is_asked_for_is_refused_with_both(tmp_path: Path) -> None:
    asked = r"is asked there ends in '<think>\\n', and a conversation with the turn has 'Hello.* in its place; give a"
    with pytest.raises(UserError, match=asked):
        load(tmp_path, [{"messages": TALK}], with_ends("deepseek_r1_distill", tmp_path), max_tokens=2000)


def test_rows_that_teach_no_end_are_told(tmp_path: Path) -> None:
    """A base model's end of sequence is often another token than the template's end of turn."""
    tokenizer: Any = char_tokenizer()
    tokenizer.eos_token = "<|end|>"
    found = load(tmp_path, [{"messages": TALK}], tokenizer)
    config: Any = SftConfig.model_validate(
        {"model": {"path": tmp_path}, "data": {"train_files": ["r"]}, "trainer": {"run_dir": "r", "steps": 1}}
    )
    assert list(endless_note(config, Inputs(tokenizer, found, None))) == []
    (tmp_path / "base").mkdir()
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": 7}')
    tokenizer.eos_token, tokenizer.name_or_path = "a", str(tmp_path / "base")
    found = load(tmp_path, [{"messages": [TALK[0], assistant("xyz")]}], tokenizer)
    (told,) = endless_note(config, Inputs(tokenizer, found, None))
    assert "of the first 1 rows none teaches a token that ends answers" in told and "eos_token_id" in told


def test_a_resumed_run_says_that_its_template_shows_another_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = char_tokenizer("{{ strftime_now('%d') }}" + CHAT_TEMPLATE)
    inputs = Inputs(tokenizer, load(tmp_path, [{"messages": TALK}], tokenizer), None)
    state = state_of_rows(inputs)
    tell_changed_rows(state, inputs)
    assert capsys.readouterr().out == ""
    tell_changed_rows({**state, "day": "2001-02-03"}, inputs)
    assert "changed since the checkpoint: the day, 2001-02-03 then and 20" in capsys.readouterr().out
    assert state_of_rows(Inputs(char_tokenizer(), inputs.train, None))["day"] == ""
