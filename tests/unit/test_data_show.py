"""`tandem data show`: what the model will read of a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tiles.task import puzzles, question
from tandem.cli import main
from tandem.jobs.show import TokenSpan, shown_tokens
from tests.pictures import make_model

TURNS = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "a"), ("user", "b"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2_5_vl", tmp_path_factory.mktemp("show") / "model")


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, Any], *options: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "config.yaml"), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_demonstration(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1", "completion": "2"}, {"messages": [*TURNS, {"role": "assistant", "content": "c"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")], "max_tokens": 64},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }
    assert shown(tmp_path, capsys, tree, "--row", "2") == [
        f"{tmp_path}/rows.jsonl, row 2 (data row 1 of a run): `messages`",
        "--- prompt, 10 tokens", "<|im_start|>user", "hi<|im_end|>", "<|im_start|>assistant", "",
        "--- learned, 3 tokens", "a<|im_end|>", "",
        "--- not learned, 9 tokens", "<|im_start|>user", "b<|im_end|>", "<|im_start|>assistant", "",
        "--- learned, 3 tokens", "c<|im_end|>", "",
    ]  # fmt: skip
    assert main(["data", "show", str(tmp_path / "config.yaml"), "--row", "3"]) == 2
    assert "--row 3: data.train_files holds 2 rows" in capsys.readouterr().err
    assert main(["data", "show", str(tmp_path / "config.yaml"), "--split", "val"]) == 2
    assert "data.val_files: there are none" in capsys.readouterr().err


def test_pairs_of_a_reward_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration looks like one of fine-tuning: the rows tell."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}))
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")], "rows_per_step": 1},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }
    pair = [
        f"{tmp_path}/rows.jsonl, row 1 (data row 0 of a run): `prompt` + `chosen` + `rejected`",
        "chosen", "--- prompt, 1 tokens", "1", "--- learned, 2 tokens", "2<|im_end|>",
        "rejected", "--- prompt, 1 tokens", "1", "--- learned, 2 tokens", "3<|im_end|>",
    ]  # fmt: skip
    assert shown(tmp_path, capsys, tree) == pair
    del tree["data"]["rows_per_step"]
    assert shown(tmp_path, capsys, tree) == pair
    tree["data"] |= {"train_files": [], "mixture": {"a": {"files": [str(tmp_path / "rows.jsonl")]}}}
    assert shown(tmp_path, capsys, tree) == pair
    rated = shown(tmp_path, capsys, tree, "preference.loss=kto", "data.rows_per_step=2")
    assert [line for line in rated if line in ("good", "bad")] == ["good", "bad"]
    assert main(["data", "show", str(tmp_path / "config.yaml"), "--job", "sft"]) == 2
    told = capsys.readouterr().err
    assert "column `completion` is missing" in told
    assert "looks like a configuration of tandem reward-model or tandem dpo: its rows are pairs" in told


def test_what_rows_hold_does_nothing_to_a_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a\x1b]0;title\x07\u202eb": 1}))
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")]},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    assert main(["sft", str(tmp_path / "config.yaml")]) == 2
    assert r"the row has a\x1b]0;title\x07\u202eb" in capsys.readouterr().err


def test_a_letter_of_several_tokens_is_shown_as_the_letter() -> None:
    """A tokenizer of bytes makes several tokens of it, and none of them is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    for text in ("é日a🎉", "日日"):
        ids = np.array(tokenizer.encode(text), np.int32)
        heading, line = shown_tokens(tokenizer, [TokenSpan("prompt", ids)])
        assert (heading.plain, line.plain) == (f"--- prompt, {len(ids)} tokens", text)
    cut = np.array(tokenizer.encode("a日")[:3], np.int32)
    assert list(shown_tokens(tokenizer, [TokenSpan("prompt", cut)]))[1].plain == "a\ufffd"


def test_both_numbers_of_a_row(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data rows of a run are those that are kept, of all files, counted from 0; messages count a file's from 1."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1", "", "2")))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "3"}) + "\n")
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")], "prompts_per_step": 1},
        "algorithm": {"type": "grpo"},
        "generation": {"max_response_tokens": 4},
        "reward": {"functions": ["examples/tiles/reward.py:compute_score"]},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }
    heading = {
        option: shown(tmp_path, capsys, tree, *option.split())[0]
        for option in ("--row 1", "--row 3", "--row 4", "--prompt-index 1", "--prompt-index 2")
    }
    assert heading["--row 1"] == f"{tmp_path}/a.jsonl, row 1 (data row 0 of a run): `prompt`"
    assert heading["--row 3"] == heading["--prompt-index 1"]
    assert heading["--row 3"] == f"{tmp_path}/a.jsonl, row 3 (data row 1 of a run): `prompt`"
    assert heading["--row 4"] == heading["--prompt-index 2"]
    assert heading["--row 4"] == f"{tmp_path}/b.jsonl, row 1 (data row 2 of a run): `prompt`"
    for options, message in (
        (["--row", "2"], f"{tmp_path}/a.jsonl, row 2: "),
        (["--prompt-index", "3"], "--prompt-index 3: data.train_files makes 3 data rows of 4 rows; the first one is 0"),
        (["--row", "1", "--prompt-index", "0"], "--row and --prompt-index both say which row; give one of them"),
    ):
        assert main(["data", "show", str(tmp_path / "config.yaml"), *options]) == 2
        assert message in capsys.readouterr().err


def test_a_prompt_with_pictures(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = question(*next(puzzles(tmp_path, "train", 1, 0, 28 * 4)))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")], "prompts_per_step": 1, "max_prompt_tokens": 99},
        "algorithm": {"type": "grpo"},
        "generation": {"max_response_tokens": 4},
        "reward": {"functions": ["examples/tiles/reward.py:compute_score"]},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1},
    }
    lines = shown(tmp_path, capsys, tree)
    assert "<|vision_start|><|image_pad|> x 32<|vision_end|>" in "".join(lines)
    assert lines[-1] == f"data_source: tiles; ground truth: '{row['reward_model']['ground_truth']}'"
    assert not (tmp_path / "run/checkpoints").exists()
