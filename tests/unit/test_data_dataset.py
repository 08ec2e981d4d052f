"""Flat rows and verl's -> Prompt, and what is said of bad ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import char_tokenizer, verl_row, write_lines

from tandem.config.data import DataConfig
from tandem.data.dataset import RLHFDataset
from tandem.errors import UserError
from tests.conftest import ROOT

TOKENIZER = char_tokenizer()
SKIP = DataConfig(on_bad_row="skip", max_prompt_tokens=40)
STRICT = DataConfig(max_prompt_tokens=40)


def load(tmp_path: Path, rows: list[Any], config: DataConfig = STRICT, tokenizer: Any = TOKENIZER) -> RLHFDataset:
    return RLHFDataset([write_lines(tmp_path / "rows.jsonl", rows)], tokenizer, config)


def test_a_verl_row_goes_through_the_chat_template(tmp_path: Path) -> None:
    dataset = load(tmp_path, [verl_row("2+3=")])
    (prompt,) = list(dataset[i] for i in range(len(dataset)))
    assert prompt.text == "<|start|>user\n2+3=<|end|>\n<|start|>assistant\n"
    # 1 + "user\n" 5 + "2+3=" 4 + 1 + "\n" 1 + 1 + "assistant\n" 10: special tokens count one each.
    assert len(prompt.token_ids) == 23 and prompt.token_ids.dtype == np.int32
    assert TOKENIZER.decode(prompt.token_ids.tolist()).replace(" ", "") == prompt.text.replace(" ", "")
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (0, "sums", "5")
    assert prompt.row == verl_row("2+3=")
    assert dataset.descriptions == ["rows.jsonl: 1 verl rows; 0 skipped"]


def test_trl_rows_are_strings_as_they_are_or_messages(tmp_path: Path) -> None:
    rows = [{"prompt": "ab ", "answer": 7, "level": 2}, {"prompt": [{"role": "user", "content": "ab"}]}]
    plain, chat = load(tmp_path, rows)[0], load(tmp_path, rows)[1]
    assert (plain.text, plain.data_source, plain.ground_truth) == ("ab ", "default", 7)
    assert plain.token_ids.tolist() == TOKENIZER.convert_tokens_to_ids(["a", "b", " "])
    assert plain.row == rows[0]
    assert chat.text == "<|start|>user\nab<|end|>\n<|start|>assistant\n"
    assert (chat.index, chat.ground_truth) == (1, None)


def test_the_description_calls_flat_rows_by_their_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "data_source": "sums", "ground_truth": "2"}, verl_row(), {"prompt": "ab"}]
    found = "1 `prompt` + `data_source` rows, 1 verl rows, 1 `prompt` rows"
    assert load(tmp_path, rows).descriptions == [f"rows.jsonl: {found}; 0 skipped"]


def test_whose_rows_they_are_is_told_with_what_is_read_of_them(tmp_path: Path) -> None:
    rows = [
        verl_row(),
        {"prompt": "a", "answer": "b", "level": 1},
        {"prompt": "a", "ground_truth": "b", "solution": "c"},
    ]
    by_name = "by their names, if a reward function asks for them"
    assert load(tmp_path, rows).forms == [
        f"verl's: prompt, data_source, reward_model.ground_truth; {by_name}: ability, extra_info",
        f"TRL's: prompt, ground_truth; {by_name}: level, solution",
    ]


def test_every_row_that_the_page_shows_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in page.split("```json\n")[1].split("\n```")[0].splitlines()]
    dataset = load(tmp_path, rows, DataConfig(train_files=[], max_prompt_tokens=200))
    assert dataset.descriptions[0].endswith(
        ": 1 verl rows, 1 `prompt` + `data_source` rows, 1 `prompt` rows; 0 skipped"
    )
    assert [prompt.ground_truth for prompt in dataset] == ["5"] * 3
    assert [prompt.data_source for prompt in dataset] == ["openai/gsm8k", "sums", "default"]


def test_special_tokens_are_added_once(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(around="<bos> $A <eos>", chat_template="<bos>" + char_tokenizer().chat_template)
    rows = [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "a<eos>"}]
    dataset = load(tmp_path, rows, tokenizer=tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert dataset[0].token_ids.tolist() == [bos, *tokenizer.convert_tokens_to_ids(["a", "b"])]
    assert dataset[1].token_ids.tolist().count(bos) == 1 and eos not in dataset[1].token_ids
    assert dataset[2].token_ids[-1] == eos


def test_ground_truth_column_comes_before_answer(tmp_path: Path) -> None:
    row = {"prompt": "a", "ground_truth": "x", "answer": "y"}
    assert load(tmp_path, [row])[0].ground_truth == "x"
    assert load(tmp_path, [verl_row(answer="y")])[0].ground_truth == "5"


def test_parquet_cells_come_back_plain_and_files_follow_one_another(tmp_path: Path) -> None:
    first = tmp_path / "first.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row("1"), verl_row("2", images=[], tools=None)]), first)
    second = write_lines(tmp_path / "second.jsonl", [{"prompt": "3"}])
    dataset = RLHFDataset([first, second], TOKENIZER, STRICT)
    assert len(dataset) == 3 and [dataset[i].index for i in range(3)] == [0, 1, 2]
    assert dataset[1].row["reward_model"] == {"style": "rule", "ground_truth": "5"}
    assert dataset[1].row["prompt"] == [{"role": "user", "content": "2"}]
    assert dataset.descriptions == ["first.parquet: 2 verl rows; 0 skipped", "second.jsonl: 1 `prompt` rows; 0 skipped"]


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


BAD_ROWS = [
    ({"question": "a"}, "column `prompt` is missing"),
    ({"prompt": None, "answer": "a"}, "column `prompt` is null"),
    ({"prompt": ""}, "column `prompt` is empty"),
    ({"prompt": " \n"}, r"column `prompt` holds only whitespace: ' \\n'"),
    ({"prompt": []}, r"column `prompt` is empty"),
    (verl_row(" "), r"column `prompt`: its last message holds only whitespace, which many chat templates strip"),
    ({"prompt": 7}, "column `prompt` has the wrong type: a number, not text or a list of messages"),
    ({"prompt": ["a"]}, "column `prompt` has the wrong type: message 1 is not {role, content}"),
    ({"prompt": [message("a"), {"content": "b"}]}, "message 2 is not {role, content} of text"),
    ({"prompt": [message([{"type": "text"}])]}, "message 1 has a part of type .text., or one without its text"),
    ({"prompt": [message("a"), message("b", "system")]}, "refused by the chat template: system must come first"),
    ({"prompt": "\ud800"}, "the line is not valid JSON: .*surrogates"),
    ({"prompt": "x" * 41}, "column `prompt` is 41 tokens long; data.max_prompt_tokens is 40"),
    ({"prompt": "x" * 100_000}, "column `prompt` is more than 1,184 tokens long; data.max_prompt_tokens is 40"),
    (verl_row("x" * 100_000), "column `prompt` is more than 1,[0-9]+ tokens long; data.max_prompt_tokens is 40"),
    (verl_row("x" * 22), "column `prompt` is 41 tokens long; data.max_prompt_tokens is 40"),
    (verl_row(images=["a.png"]), "no store was given for them"),
    (verl_row(videos=["a.mp4"]), "files of videos are not decoded"),
    (verl_row(tools=[{}]), "column `tools` is not supported yet"),
    (verl_row(data_source=3), "column `data_source` has the wrong type: a number, not text"),
    (verl_row(data_source="a\x1b[2Jb"), "column `data_source` has control characters or several lines"),
    (verl_row(data_source="a\nb"), "column `data_source` has control characters or several lines"),
    (verl_row(reward_model="rule"), "column `reward_model` has the wrong type: text, not an object"),
    ([1], "the line holds a list, not an object"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_with_column_and_reason_or_left_out(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)^1 of 2 rows are bad; .*rows\.jsonl, row 2: .*{reason}"):
        load(tmp_path, [verl_row(), row])
    dataset = load(tmp_path, [row, verl_row()], SKIP)
    assert (len(dataset), dataset.skipped, dataset[0].index) == (1, 1, 0)


def test_a_prompt_of_which_no_token_is_made_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.data.dataset.encode", lambda *_, **__: [])
    with pytest.raises(UserError, match="row 1: the tokenizer makes no token of column `prompt`"):
        load(tmp_path, [{"prompt": "a"}])


def test_a_long_read_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(100))  # a second a look
    monkeypatch.setattr("tandem.data.rows.time.monotonic", lambda: float(next(clock)))
    load(tmp_path, [{"prompt": "a"}] * 30)
    assert capsys.readouterr().out.splitlines()[:2] == ["rows.jsonl: 3 rows read", "rows.jsonl: 14 rows read"]


def test_a_row_at_the_limit_is_good(tmp_path: Path) -> None:
    assert len(load(tmp_path, [{"prompt": "x" * 40}])[0].token_ids) == 40


def test_bad_rows_are_told_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 41}, {"prompt": ""}, *[{"prompt": ""}] * 10, verl_row()]
    with pytest.raises(UserError) as caught:
        load(tmp_path, rows)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("12 of 13 rows are bad; ") and "data.on_bad_row=skip" in lines[0]
    assert [int(line.split("row ")[1].split(":")[0]) for line in lines[1:]] == list(range(1, 11))


def test_skipped_rows_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": ""}, verl_row(), {"prompt": "x" * 50}, {"prompt": ""}])
    with path.open("a") as file:
        file.write('{"prompt": "cut o')
    dataset = RLHFDataset([path], TOKENIZER, SKIP)
    assert (len(dataset), dataset.skipped) == (1, 4)
    assert dataset.descriptions == ["rows.jsonl: 1 verl rows; 4 skipped, the first: row 1: column `prompt` is empty"]


def test_nothing_left_is_an_error_whatever_the_policy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable row is left"):
        load(tmp_path, [{"prompt": ""}], SKIP)


def test_messages_without_a_chat_template_are_one_error_not_many_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the rows hold messages, .*chat_template.*string prompts$"):
        load(tmp_path, [verl_row()] * 3, SKIP, char_tokenizer(chat_template=None))
    assert len(load(tmp_path, [{"prompt": "a"}], STRICT, char_tokenizer(chat_template=None))) == 1
