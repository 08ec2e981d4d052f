"""Each of the user's mistakes gets one clear message and exit status 2, before a run directory exists."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.jobs.notes import disk_line, notes
from tests.conftest import ROOT


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command says."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return printed.err


def test_prompts_that_are_too_long(capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path) -> None:
    message = refused(capsys, "train", str(grpo_config), "data.max_prompt_tokens=3")
    for words in ("train.jsonl", "row 1", "5", "3"):
        assert words in message
    assert not (tmp_path / "run").exists()


def test_mistakes_in_files_and_model_are_listed_at_once(capsys: pytest.CaptureFixture[str], grpo_config: Path) -> None:
    """Also those that only transformers finds."""
    overrides = ["data.max_prompt_tokens=3", "algorithm.type=json:loads"]
    message = refused(capsys, "train", str(grpo_config), *overrides)
    for words in (
        "3 errors",
        "data.train_files: 1,024 of 1,024 rows",
        "data.val_files: 256 of 256 rows",
        "no such subclass",
    ):
        assert words in message, message


def test_broken_data_files(capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"prompt": ["1="] * 999, "data_source": ["sort4"] * 999}), whole)
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(whole.read_bytes()[:-100])
    columnless = tmp_path / "columnless.jsonl"
    columnless.write_text(json.dumps({"question": "1="}) + "\n")
    for path in (empty, truncated, columnless):
        assert str(path) in refused(capsys, "train", str(grpo_config), f"data.train_files=[{path}]")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(completion, level): return 1.0", ["needs the column `level`, which no row has in data.train_files"]),
        ("def f(completion:\n  return 1", ["rewards.py", "line 1", "def f(completion:", "SyntaxError: '(' was never"]),
    ],
)
def test_a_reward_that_cannot_work(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path, source: str, said: list[str]
) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    message = refused(capsys, "train", str(grpo_config), f"reward.functions=[{path}:f]")
    for words in said:
        assert words in message, message
    assert "tandem/" not in message and not (tmp_path / "run").exists()


def test_a_model_without_tokenizer(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(sort4 / "model", bare, ignore=shutil.ignore_patterns("*token*", "vocab*", "merges*", "special*"))
    message = refused(capsys, "train", str(grpo_config), f"model.path={bare}")
    assert str(bare) in message and "tokenizer" in message


def test_files_that_are_no_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such configuration file" in refused(capsys, "train", "/nowhere.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    assert "must hold sections" in refused(capsys, "train", str(path))
    path.write_text("model: {path: ")
    assert "not valid YAML" in refused(capsys, "train", str(path))
    assert "no configuration given" in refused(capsys, "train")
    assert "there is no run (no config.yaml)" in refused(capsys, "train", "--resume", str(tmp_path))


def test_a_directory_that_holds_another_run(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {}")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert "--resume" in refused(capsys, "train", str(grpo_config))


def test_what_is_seldom_meant_is_said(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    (tmp_path / "three.jsonl").write_text("".join((sort4 / "train.jsonl").read_text().splitlines(keepends=True)[:3]))
    few_rows, many_ranks = f"data.train_files=[{tmp_path}/three.jsonl]", f"cluster.ranks={2 * os.cpu_count()}"
    assert main(["train", str(grpo_config), few_rows, many_ranks, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "note: data.prompts_per_step: 4, but data.train_files holds 3 rows" in printed
    if not torch.cuda.is_available():
        assert f"note: cluster.ranks: {2 * os.cpu_count()} processes compute on" in printed
    assert "note: trainer.eval_every is 0: the rows to validate on are read, and never asked" in printed
    assert main(["train", str(grpo_config), "trainer.eval_every=3", "--dry-run"]) == 0
    assert "note: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "overrides", "told"),
    [
        ("qwen2_vl", ["model.vision_tower=train", "model.lora.rank=8"], True),
        ("qwen2_vl", ["model.lora.rank=8"], False),
        ("qwen2_vl", ["model.vision_tower=train"], False),
        ("qwen2", ["model.vision_tower=train", "model.lora.rank=8"], False),
        ("qwen2_vl", ["model.vision_tower=train", "algorithm.type=ppo", "model.critic_lora.rank=8"], True),
    ],
)
def test_a_tower_that_adapters_leave_as_it_is_is_said(
    tmp_path: Path, kind: str, overrides: list[str], told: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", [f"model.path={tmp_path}", *overrides])
    said = [note for note in notes(config, 9999) if note.startswith("model.vision_tower: train, but with model.")]
    assert len(said) == told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "1,024 answers of at most 32,768 tokens writes about 677.0 MiB; about 20.0 GiB stay"),
        (["trainer.steps=10"], "about 6.6 GiB stay"),
        (["trainer.steps=10", "trainer.trajectories_every=5"], "about 1.3 GiB stay"),
        (["trainer.keep_trajectories=10"], "about 6.6 GiB stay"),
        (["trainer.keep_trajectories_gib=0.1"], "about 677.0 MiB stay"),
        (["trainer.keep_trajectories_gib=0"], "about 66.1 GiB stay"),
        (["trainer.keep_trajectories_gib=0", "trainer.keep_trajectories=0"], "about 661.1 GiB stay"),
        (["trainer.keep_trajectories_gib=0", "trainer.keep_trajectories=0", "trainer.epochs=1"], "all of them stay"),
        (["trainer.trajectories_every=0"], None),
    ],
)
def test_a_run_says_what_its_trajectories_take(overrides: list[str], told: str | None) -> None:
    sizes = ["data.prompts_per_step=128", "data.max_prompt_tokens=640", "generation.max_response_tokens=32768"]
    steps = [] if "trainer.epochs=1" in overrides else ["trainer.epochs=null", "trainer.steps=1000"]
    sizes += ["algorithm.group_size=8", *steps]
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", [*sizes, *overrides])
    lines = list(disk_line(config))
    assert [told in line for line in lines] == ([True] if told else []), lines


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path) -> None:
    assert main(["train", str(grpo_config), "--dry-run"]) == 0
    printed, told = capsys.readouterr()
    assert told.startswith(f"{grpo_config}: no mistakes so far; loading torch"), "before seconds pass in imports"
    assert "1,024" in printed and printed.endswith("dry run: nothing is wrong with this, and nothing was started\n")
    assert not (tmp_path / "run").exists()


def test_a_reward_model_that_cannot_judge_the_policy(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    """None there; two without a head that scores; one with two labels."""
    language, labels = (tmp_path / name for name in ("language", "labels"))
    sizes = {"vocab_size": 99, "n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": 1, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(language)  # its class is named unlike the others
    AutoModelForTokenClassification.from_pretrained(sort4 / "model", num_labels=2).save_pretrained(labels)
    for directory in (language, labels):
        AutoTokenizer.from_pretrained(sort4 / "model").save_pretrained(directory)
    for path, said in (
        (tmp_path / "none", f"model.reward_model_path: {tmp_path}/none is not there"),
        (sort4 / "model", "is a language model, without a head that scores"),
        (language, "is a language model, without a head that scores"),
        (labels, f"the head of {labels} gives 2 numbers, not one score"),
    ):
        assert said in refused(capsys, "train", str(grpo_config), f"model.reward_model_path={path}")
    assert not (tmp_path / "run").exists()


def test_a_critic_that_cannot_read_the_policys_tokens(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    """With a tokenizer that knows a token more, and with rows for too few tokens; it needs no tokenizer of its own."""
    other, small, bare = (tmp_path / name for name in ("other", "small", "bare"))
    for directory, rows in ((other, 100), (small, 90), (bare, 128)):
        model = AutoModelForCausalLM.from_pretrained(sort4 / "model")
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(sort4 / "model")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    ppo = ("train", str(grpo_config), "algorithm={type: ppo}")
    told = refused(capsys, *ppo, f"model.critic_path={other}")
    assert f"model.critic_path: the tokenizer of {other} (100 tokens) is not that of {sort4}/model (99 tokens)" in told
    told = refused(capsys, *ppo, f"model.critic_path={small}")
    assert f"model.critic_path: {small} has rows for 90 token ids (vocab_size), and the policy draws ids up to" in told
    assert main([*ppo, f"model.critic_path={bare}", "--dry-run"]) == 0


def test_files_that_cannot_be_written_are_told_before_the_evaluation(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.parquet").mkdir()
    for option in ("--out", "--answers"):
        for path in (tmp_path / "file/metrics.parquet", tmp_path / "folder.parquet"):
            told = refused(capsys, "eval", str(grpo_config), option, str(path))
            assert told.startswith(f"tandem: {option} {path}: ") and "what is written" not in told
    told = refused(capsys, "eval", str(grpo_config), "--answers", str(tmp_path / "answers.csv"))
    assert f"what is written is parquet; say {tmp_path / 'answers.parquet'}" in told


def test_two_halves_of_a_run_at_once(capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path) -> None:
    halves = ["--debug-rollout", "--debug-train", str(tmp_path)]
    assert "give one of them" in refused(capsys, "train", str(grpo_config), *halves)


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        ("data show c --row 0", "invalid value for '--row': input should be greater than or equal to 1, not '0'",
         "data show"),
        ("plan c --job rl", "invalid value for '--job': 'rl' is not one of 'train', 'sft', 'dpo', 'reward-model'",
         "plan"),
        ("train --nope", "no such option: --nope", "train"),
        ("runs a b", "got unexpected extra argument(s) (b)", "runs"),
        ("serv", "no such command 'serv'. Did you mean 'serve', 'search'?", ""),
    ],
)  # fmt: skip
def test_arguments_that_no_command_takes(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str, command: str
) -> None:
    place = f"tandem {command}".strip()
    assert refused(capsys, *arguments.split()) == f"tandem: {message}; see {place} --help\n"


def test_a_command_without_its_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    printed = capsys.readouterr()
    assert "convert" in printed.out and printed.err == ""
