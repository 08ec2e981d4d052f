"""Columns that mean something to other frameworks, and rows of other forms: refused, with the way to what is read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import char_tokenizer, write_lines

from tandem.cli import main
from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.reward import RewardConfig
from tandem.data.columns import Kind, check_columns
from tandem.data.dataset import RLHFDataset
from tandem.data.preference import PreferenceDataset, RatedDataset
from tandem.data.rows import BadRow
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.models.end_of_sequence import end_mismatch
from tandem.reward.functions import check_functions

TOKENIZER = char_tokenizer()
USER, ANSWER, OTHER = (
    {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
GOOD: dict[Kind, Any] = {
    "prompts": {"prompt": [USER]},
    "demonstrations": {"messages": [USER, ANSWER]},
    "pairs": {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    "rated": {"prompt": [USER], "completion": [ANSWER], "label": True},
}
DATASETS: dict[Kind, Any] = {
    "prompts": RLHFDataset, "demonstrations": SftDataset, "pairs": PreferenceDataset, "rated": RatedDataset,
}  # fmt: skip
EVERYWHERE = {
    "system": "Be brief.",
    "system_prompt": "Be brief.",
    "history": [["a", "b"]],
    "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False,
    "audios": ["a.wav"],
}
WHERE_ANSWERS_ARE_LEARNED = {
    "input_ids": [1, 2],
    "labels": [1, 2],
    "loss_mask": [0, 1],
    "completion_mask": [0, 1],
    "assistant_masks": [0, 1],
    "weight": 0.5,
    "functions": [{"name": "f"}],
    "kto_tag": False,
}


def load(kind: Kind, tmp_path: Path, row: Any, tokenizer: Any = TOKENIZER, **options: Any) -> Any:
    path = write_lines(tmp_path / "rows.jsonl", [row])
    config: Any = (DataConfig if kind == "prompts" else SftDataConfig)(**options)
    return DATASETS[kind]([path], tokenizer, config)


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("column", [*EVERYWHERE, *WHERE_ANSWERS_ARE_LEARNED])
def test_columns_that_mean_something_elsewhere(kind: Kind, column: str, tmp_path: Path) -> None:
    row = GOOD[kind] | {column: (EVERYWHERE | WHERE_ANSWERS_ARE_LEARNED)[column]}
    if kind == "prompts" and column not in EVERYWHERE:
        assert len(load(kind, tmp_path, row)) == 1  # to rewards it may be anything
        return
    with pytest.raises(UserError, match=rf"row 1: column `{column}` is not read: \w"):
        load(kind, tmp_path, row)
    assert len(load(kind, tmp_path, GOOD[kind] | {column: None})) == 1


def test_answers_that_are_labelled_bad_are_not_imitated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1: column `label` is not read: it says which answers are good"):
        load("demonstrations", tmp_path, GOOD["demonstrations"] | {"label": False})
    assert len(load("demonstrations", tmp_path, GOOD["demonstrations"] | {"label": 3})) == 1  # a class, say


HINTS: list[tuple[Kind, Any, str]] = [
    ("prompts", {"question": "2+3?", "answer": "5"}, "prompt=question --map ground_truth=answer --map data_s"),
    ("prompts", {"problem": "2+3?", "solution": "5"}, "prompt=problem --map ground_truth=solution --map data_source=N"),
    ("prompts", {"messages": [USER]}, "prompt=messages"),
    ("demonstrations", {"question": "2+3?", "answer": "5"}, "prompt=question --map completion=answer"),
    ("demonstrations", {"query": "2+3?", "response": "5"}, "prompt=query --map completion=response"),
    ("demonstrations", {"prompt": "2+3?", "response": "5"}, "prompt=prompt --map completion=response"),
    ("demonstrations", {"instruction": "Add.", "input": "2 3", "output": "5"}, "{instruction}\n{input}' --map comp"),
    ("demonstrations", {"instruction": "Add.", "output": "5"}, "prompt=instruction --map completion=output"),
    ("demonstrations", {"conversations": [USER, ANSWER]}, "messages=conversations"),
    ("demonstrations", {"prompt": "2+3?", "chosen": "5", "rejected": "6"}, "prompt=prompt --map completion=chosen"),
    ("demonstrations", {"prompt": "2+3?", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "messages=chosen"),
    (
        "demonstrations",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        "prompt=prompt --map completion=c",
    ),
    ("pairs", {"prompt": "2?", "response": "2", "rejected_response": "3"}, "chosen=response --map rejected=rejected_"),
    ("rated", {"question": "2?", "response": "2", "label": True}, "prompt=question --map completion=response --map"),
]


PUBLISHED: dict[str, Any] = {
    "gsm8k": {"question": "2+3?", "answer": "2+3 = <<2+3=5>>5\n#### 5"},
    "math": {"problem": "x?", "level": "Level 1", "type": "Algebra", "solution": r"It is \boxed{5}."},
    "math500": {"problem": "x?", "solution": r"\boxed{5}", "answer": "5", "subject": "Algebra", "level": 2},
    "mbpp": {"task_id": 700, "text": "Add.", "code": "def f(): ...", "test_list": ["assert f()"]},
    "aqua": {"question": "1+1?", "options": ["A)1", "B)2"], "rationale": "So B", "correct": "B"},
    "hellaswag": {"activity_label": "Vault", "ctx": "He runs", "endings": ["up.", "down."], "label": "1"},
    "squad": {"context": "Paris.", "question": "Where?", "answers": {"text": ["Paris"], "answer_start": [0]}},
    "hotpotqa": {"question": "Where?", "answer": "Paris", "supporting_facts": {"title": ["Paris"], "sent_id": [0]}},
    "musique": {"question": "Where?", "answer": "Paris", "answer_aliases": ["City of Light"]},
    "hh": {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    "geo3k": {"images": [{"bytes": b"PNG"}], "problem": "<image>Find x.", "answer": "3"},
    "puzzlevqa": {"image": {"bytes": b"PNG"}, "question": "Which?", "options": [6, 3], "answer": "3"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_as_published_name_the_command_of_their_data_set(name: str, tmp_path: Path) -> None:
    """Its ground truth is what a reward compares with, not the whole solution."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([PUBLISHED[name]]), path)
    with pytest.raises(BadRow) as told:
        check_columns(PUBLISHED[name], "prompts", path)
    asked = str(told.value).partition(" It is made by: ")[2]
    assert asked == f"tandem data {name} --in {path} --out DIR"
    assert main(shlex.split(asked.replace("DIR", str(tmp_path / "made")))[1:]) == 0
    made = sorted((tmp_path / "made").rglob("*.parquet"))
    (truth,) = (row["reward_model"]["ground_truth"] for row in rows_of(made) if "reward_model" in row)
    assert "####" not in str(truth) and "boxed" not in str(truth)


def rows_of(paths: list[Path]) -> list[Any]:
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_rows_to_imitate_are_no_questions() -> None:
    """What is learned of GSM8K is the whole solution; of HH the chosen reply."""
    with pytest.raises(BadRow, match="tandem data columns --in FILE --out DIR --map prompt=question --map completion="):
        check_columns(PUBLISHED["gsm8k"], "demonstrations")
    with pytest.raises(BadRow, match="tandem data hh --in FILE --out DIR"):
        check_columns(PUBLISHED["hh"], "demonstrations")


def test_rows_that_have_their_answer_are_not_taken_for_a_data_set_s() -> None:
    for row in (PUBLISHED["math"] | {"answer": "5"}, PUBLISHED["gsm8k"] | {"answer": "5"}):
        with pytest.raises(BadRow, match=r"tandem data columns .* --map ground_truth=answer"):
            check_columns(row, "prompts")


@pytest.mark.parametrize("name", ["humaneval", "humanevalplus", "mbppplus", "ifeval"])
def test_published_rows_with_a_prompt_name_it_where_no_reward_is_found(
    name: str, grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, Any] = {
        "mbppplus": {"prompt": "Add.", "code": "def f(): ...", "test_list": ["assert f()"], "test": "assert f()"},
        "ifeval": {"prompt": "Say.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    }
    program = {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    ...",
        "test": "def check(c): ...",
    }
    path = write_lines(tmp_path / f"{name}.jsonl", [rows.get(name, program)])
    files = [f"data.train_files=[{path}]", "data.val_files=[]", "trainer.eval_every=0", "reward.functions=[]"]
    assert main(["train", str(grpo_config), "--dry-run", *files]) == 2
    told = "data.train_files: rows as they are published have no ground truth that is read; it is made by: tandem data "
    assert told + name.removesuffix("plus" if name.startswith("h") else "") in capsys.readouterr().err
    if name.startswith("h"):
        trial = ["reward", "test", "built-in", "--data", str(path), "--answer", "canonical_solution"]
        assert main(trial) == 2
        assert f"this makes: tandem data {name} --in {path} --out DIR" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "row", "command"), HINTS)
def test_rows_of_other_forms_name_the_command_that_changes_them(
    kind: Kind, row: Any, command: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "my rows.jsonl", [row])
    with pytest.raises(BadRow) as told:
        check_columns(row, kind, path)
    asked = str(told.value).partition(" It is made by: ")[2]
    assert asked.startswith("tandem data columns --in ") and command in asked
    given = shlex.split(asked.replace("DIR", str(tmp_path / "made")).replace("data_source=NAME", "data_source=sums"))
    assert main(given[1:]) == 0
    assert len(DATASETS[kind]([tmp_path / "made/train.parquet"], TOKENIZER, _config(kind))) == 1


def _config(kind: Kind) -> Any:
    return DataConfig() if kind == "prompts" else SftDataConfig()


def test_the_dry_run_names_the_command(grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"question": "2+3?", "answer": "5"}])
    assert main(["train", str(grpo_config), "--dry-run", f"data.train_files=[{path}]"]) == 2
    told = "column `prompt` is missing; the row has question, answer. It is made by: tandem data columns --in "
    assert f"row 1: {told}{path} --out DIR --map prompt=question" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_turns_of_from_and_value_are_told(kind: Kind, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    for given in (turns, json.dumps(turns)):
        with pytest.raises(UserError, match="column `conversations` has turns of `from` and `value`; write them as"):
            load(kind, tmp_path, {"conversations": given})


def test_plain_text_is_no_demonstration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="column `text` is not read: rows need a prompt and an answer, or messages"):
        load("demonstrations", tmp_path, {"text": "Once upon a time"})


def test_messages_do_not_become_text_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": [USER]}])
    maps = ["--map", "prompt=messages", "--map", "data_source=x"]
    assert main(["data", "columns", "--in", str(path), "--out", str(tmp_path / "made"), *maps]) == 2
    assert "the prompt is messages, which stay as they are without data_source" in capsys.readouterr().err


def pair(**columns: Any) -> Any:
    return {"score_chosen": 8.0, "score_rejected": 3.0, **columns}


def prompt_of(tmp_path: Path, row: Any) -> tuple[str, str, str]:
    """What both answers follow, and each of them."""
    (found,) = load("pairs", tmp_path, row)
    assert found.chosen.prompt_ids.tolist() == found.rejected.prompt_ids.tolist()
    parts = (found.chosen.prompt_ids, found.chosen.response_ids, found.rejected.response_ids)
    prompt, chosen, rejected = ("".join(TOKENIZER.convert_ids_to_tokens(part.tolist())) for part in parts)
    return prompt, chosen, rejected


ASKED = "<|start|>user\nhi<|end|>\n<|start|>assistant\n", "yes<|end|>\n", "no<|end|>\n"


@pytest.mark.parametrize(
    "row",
    [
        pair(prompt="hi", chosen=[USER, ANSWER], rejected=[USER, OTHER], messages=[USER, ANSWER]),  # UltraFeedback
        pair(prompt="hi", chosen=[ANSWER], rejected=[OTHER]),
        pair(prompt=[USER], chosen=[USER, ANSWER], rejected=[USER, OTHER]),
        pair(prompt=[USER], chosen=[ANSWER], rejected=[OTHER]),
        pair(chosen=[USER, ANSWER], rejected=[USER, OTHER]),
    ],
)
def test_a_prompt_is_found_in_every_form_of_pairs(row: Any, tmp_path: Path) -> None:
    assert prompt_of(tmp_path, row) == ASKED


def test_preferences_of_several_turns(tmp_path: Path) -> None:
    """What comes before the first difference is the prompt; every later answer counts."""
    more = {"role": "user", "content": "so"}
    row = {"chosen": [USER, ANSWER, more, OTHER], "rejected": [USER, ANSWER, more, ANSWER]}
    assert prompt_of(tmp_path, row)[0].endswith("yes<|end|>\n<|start|>user\nso<|end|>\n<|start|>assistant\n")
    (found,) = load("pairs", tmp_path, {"chosen": [USER, OTHER, more, ANSWER], "rejected": [USER, ANSWER, more, OTHER]})
    assert found.chosen.loss_mask.sum() == len("no") + len("yes") + 4


BAD_PAIRS: list[tuple[Any, str]] = [
    ({"prompt": "ho", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, "column `prompt` is text, and not among"),
    ({"chosen": [USER], "rejected": [USER, OTHER]}, "column `chosen` holds the prompt alone"),
    ({"chosen": [ANSWER], "rejected": [OTHER]}, "no column `prompt`, and `chosen` and `rejected` begin with nothing"),
    ({"chosen": "ab", "rejected": "cd"}, "no column `prompt`, and `chosen` and `rejected` begin with nothing"),
    ({"prompt": [USER], "chosen": "yes", "rejected": "no"}, "column `chosen` has the wrong type: text, not a list"),
    (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": "no"},
        "column `rejected` has the wrong type: text, not a list",
    ),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER | {"content": ""}]}, "column `rejected` is empty"),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER | {"content": " "}]}, "column `rejected`: its last mes"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "column `rejected` is empty"),
]


@pytest.mark.parametrize(("row", "told"), BAD_PAIRS)
def test_a_bad_pair_is_told_by_its_own_columns(row: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"row 1: .*{told}"):
        load("pairs", tmp_path, row)


@pytest.mark.parametrize("kind", ["pairs", "rated"])
def test_answers_of_whitespace_alone_are_compared(kind: Kind, tmp_path: Path) -> None:
    found = load(kind, tmp_path, {"prompt": "12=", "chosen": "21", "rejected": "\n"})
    worse = found[0].rejected if kind == "pairs" else found[1].answer
    assert worse.response_ids.tolist() == TOKENIZER.convert_tokens_to_ids(["\n", "<eos>"])


@pytest.mark.parametrize(
    ("shared", "chosen", "rejected"),
    [
        ("问：天空是什么颜色？答：", "蓝色。", "绿色。"),
        ("空は何色ですか。", "青です。", "緑です。"),
        ("ท้องฟ้าสีอะไร", "ฟ้า", "เขียว"),
        ("What is it? It is ", "blue", "black"),
        ("What is it?\n", "Blue", "Green"),
    ],
)
def test_the_common_beginning_ends_where_a_word_does(shared: str, chosen: str, rejected: str, tmp_path: Path) -> None:
    from test_data_sft import byte_pair_tokenizer

    tokenizer = byte_pair_tokenizer()
    row = {"chosen": shared + chosen, "rejected": shared + rejected}
    (found,) = load("pairs", tmp_path, row, tokenizer)
    assert tokenizer.decode(found.chosen.prompt_ids.tolist()) == shared


@pytest.mark.parametrize(
    ("kind", "row"), [("prompts", {"prompt": "<bos>1"}), ("demonstrations", {"prompt": "<bos>1", "completion": "2"})]
)
def test_a_prompt_that_begins_with_bos_twice_is_told(kind: Kind, row: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1: it begins with <bos> twice: one stands in the text, .*; take it out"):
        load(kind, tmp_path, row, char_tokenizer(around="<bos> $A"))
    assert len(load(kind, tmp_path, row)) == 1  # a tokenizer that adds none


@pytest.mark.parametrize("kind", ["prompts", "demonstrations", "pairs", "rated"])
def test_a_template_that_writes_bos_twice_is_told(kind: Kind, tmp_path: Path) -> None:
    from data_tokenizer import CHAT_TEMPLATE

    with pytest.raises(UserError, match="it begins with <bos> twice: one stands in the chat template; write it once"):
        load(kind, tmp_path, GOOD[kind], char_tokenizer("{{ bos_token }}{{ bos_token }}" + CHAT_TEMPLATE))
    assert len(load(kind, tmp_path, GOOD[kind], char_tokenizer("{{ bos_token }}" + CHAT_TEMPLATE))) == 1


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_that_differs_is_told(name: str, tmp_path: Path) -> None:
    end = TOKENIZER.eos_token_id
    for sound in ("{}", f'{{"eos_token_id": {end}}}', f'{{"eos_token_id": [4, {end}]}}', '{"eos_token_id": null}'):
        (tmp_path / name).write_text(sound)
        assert end_mismatch(tmp_path, TOKENIZER) is None
    (tmp_path / name).write_text('{"text_config": {"eos_token_id": [4]}}')
    told = rf"the tokenizer's end of sequence is '<eos>' \({end}\), and that of .*/{name} '<\|end\|>' \(4\)"
    assert re.search(told, str(end_mismatch(tmp_path, TOKENIZER)))


def test_a_dry_run_tells_another_end_of_sequence(
    grpo_config: Path, sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (sort4 / "model").iterdir():
        (model / path.name).symlink_to(path)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert main(["train", str(grpo_config), "--dry-run", f"model.path={model}"]) == 0
    assert "note: model.path: the tokenizer's end of sequence is" in capsys.readouterr().out


def test_functions_that_one_could_give_are_named() -> None:
    with pytest.raises(UserError, match=r"no built-in reward for data_source \['mine'\]") as told:
        check_functions(RewardConfig(), ["mine"])
    for name in ("tandem.reward.rules.gsm8k:strict", "tandem.reward.rules.math:boxed"):
        assert f"{name}," in str(told.value)
