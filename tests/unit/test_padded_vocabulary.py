"""Models that have rows for more token ids than their tokenizer has tokens: such ids are never drawn, and have their
share in every log-prob, the engine's as the trainer's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.cli import main
from tandem.config.model import ModelConfig
from tandem.models.loading import load_tokenizer, never_drawn, rows_of_vocabulary, tokens_with_rows
from tandem.tracking.trajectories import read_groups
from tests.conftest import ROOT

ROWS = 160


def with_rows(model: Path, directory: Path, rows: int) -> Path:
    """The model with rows for so many ids. Those beyond its own are as likely as the others."""
    shutil.copytree(model, directory)
    made: Any = AutoModelForCausalLM.from_pretrained(model)
    own = made.config.vocab_size
    made.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        head = made.get_output_embeddings().weight
        head[own:] = head[torch.arange(max(0, rows - own)) % own]
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def padded(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_rows(sort4 / "model", tmp_path_factory.mktemp("padded") / "model", ROWS)


def drawn(files: Path) -> set[int]:
    """The ids that answers in trajectory files hold."""
    groups = [group for path in sorted(files.glob("*.parquet")) for group in read_groups(path, 0)]
    branches = [branch for group in groups for one in group.trajectories for branch in one.every_branch]
    return {int(token) for branch in branches for token in branch.response_ids}


def test_ids_without_a_token_are_those_beyond_the_tokenizers(padded: Path, sort4: Path) -> None:
    whole, config = ModelConfig(path=sort4 / "model"), ModelConfig(path=padded)
    tokenizer = load_tokenizer(config)
    tokens = len(tokenizer)
    assert rows_of_vocabulary(config) == ROWS and never_drawn(config, tokenizer) == (*range(tokens, ROWS),)
    assert tokens_with_rows(config, tokenizer) == tokens and never_drawn(whole, tokenizer) == ()


@pytest.mark.parametrize("drawing", [[], ["generation.top_p=0.9", "generation.top_k=150"]], ids=["plain", "filtered"])
def test_a_run_draws_tokens_alone_and_trainer_and_engine_agree(
    grpo_config: Path, tmp_path: Path, padded: Path, drawing: list[str]
) -> None:
    overrides = [f"model.path={padded}", "trainer.steps=1", "training.skip_zero_advantage=false", *drawing]
    assert main(["train", str(grpo_config), *overrides]) == 0
    tokens = len(load_tokenizer(ModelConfig(path=padded)))
    ids = drawn(tmp_path / "run/trajectories")
    assert len(ids) > tokens / 3 and max(ids) < tokens
    (step,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert step["rollout/mismatch_max"] < 1e-4


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_teacher_with_more_rows_teaches(grpo_config: Path, tmp_path: Path, padded: Path, top_k: int) -> None:
    """Its likeliest tokens are those of the tokenizer; ids that it alone has rows for count among all others."""
    overrides = [f"model.teacher_path={padded}", f"algorithm={{type: on_policy_distillation, top_k: {top_k}}}"]
    assert main(["train", str(grpo_config), *overrides, "trainer.steps=1"]) == 0
    (step,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert step["teacher/kl"] > 0.001, "a share of its probability is with ids that the student cannot draw"


def test_a_model_that_scores_and_has_too_few_rows_is_refused(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path, sort4: Path
) -> None:
    small = with_rows(sort4 / "model", tmp_path / "small", 90)
    overrides = [f"model.teacher_path={small}", "algorithm={type: on_policy_distillation}"]
    assert main(["train", str(grpo_config), *overrides, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"model.teacher_path: {small} has rows for 90 token ids (vocab_size), and the policy draws ids up to" in told


ASKS, SAYS = {"prompt": "1"}, "2"
BEYOND = "~"
"""A letter whose id is beyond the rows of `small`, below; those above are not."""
OF_COMMANDS: dict[str, tuple[Callable[[str], dict[str, Any]], str, str]] = {
    "sft": (lambda said: {**ASKS, "completion": said}, "sft", ""),
    "dpo": (lambda said: {**ASKS, "chosen": SAYS, "rejected": said}, "dpo", ""),
    "kto": (lambda said: {**ASKS, "completion": said, "label": True}, "dpo", "preference: {loss: kto}"),
    "reward-model": (lambda said: {**ASKS, "chosen": said, "rejected": "1"}, "reward-model", ""),
    "train": (lambda said: {"prompt": said}, "train", "algorithm: {type: grpo}"),
    "ppo": (lambda said: {"prompt": said}, "train", "algorithm: {type: ppo}"),
    "eval": (lambda said: {"prompt": said}, "eval", ""),
}


@pytest.fixture(scope="module")
def small(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With fewer rows than its tokenizer has tokens."""
    directory = with_rows(sort4 / "model", tmp_path_factory.mktemp("small") / "model", 90)
    known = load_tokenizer(ModelConfig(path=directory)).get_vocab()
    assert known[BEYOND] >= 90 > max(known["1"], known["2"]) and len(known) > 90
    return directory


def config_of(name: str, model: Path, tmp_path: Path, said: str, split: str) -> str:
    """A configuration whose rows to train on, or to validate on, say `said` once, in their second row."""
    row_of, command, section = OF_COMMANDS[name]
    files = {"train": [SAYS, SAYS], "val": [SAYS, SAYS]}
    files[split][1] = said
    for file, texts in files.items():
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row_of(text + SAYS)) + "\n" for text in texts))
    scored = command in ("train", "eval")
    most = "max_prompt_tokens" if scored else "max_tokens"
    trains = "" if command == "eval" else f"train_files: [{tmp_path}/train.jsonl], "
    size = {"train": "prompts_per_step: 1, ", "eval": ""}.get(command, "rows_per_step: 2, ")
    lines = [
        f"model: {{path: {model}}}",
        f"data: {{{trains}val_files: [{tmp_path}/val.jsonl], {size}{most}: 64}}",
        "generation: {max_response_tokens: 4}" if scored else "",
        f"reward: {{functions: ['{ROOT}/examples/sort4/reward.py:compute_score']}}" if scored else "",
        "" if command == "eval" else f"trainer: {{run_dir: {tmp_path}/run, steps: 1}}",
        section,
    ]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(filter(None, lines)))
    return str(path)


@pytest.mark.parametrize(
    "name, split",
    [("sft", "train"), ("dpo", "val"), ("kto", "train"), ("reward-model", "train"), ("train", "train"),
     ("train", "val"), ("eval", "val")],
)  # fmt: skip
def test_a_row_with_an_id_that_the_model_has_no_row_for_is_a_mistake_of_its_directory(
    capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path, name: str, split: str
) -> None:
    command = OF_COMMANDS[name][1]
    config = config_of(name, small, tmp_path, BEYOND, split)
    begin = [command, config, *([] if command == "eval" else ["--dry-run"])]
    said = f"model.path: {small} has rows for 90 token ids (vocab_size), and {tmp_path}/{split}.jsonl, row 2 has id "
    cached = f"data.cache={{files_from_mib: 0, workers: 1, directory: {tmp_path}/cache}}"
    for options in ([], ["data.on_bad_row=skip", cached]):
        assert main([*begin, *options]) == 2
        assert said in (told := capsys.readouterr().err) and "('~')" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["sft", "train"])
def test_a_tokenizer_may_have_ids_beyond_the_models_that_no_row_has(small: Path, tmp_path: Path, name: str) -> None:
    assert main([OF_COMMANDS[name][1], config_of(name, small, tmp_path, SAYS, "train")]) == 0


def test_a_critic_needs_rows_for_what_the_policy_draws_alone(small: Path, sort4: Path, tmp_path: Path) -> None:
    """Both have rows for 90 ids, and their tokenizer has more."""
    config = config_of("ppo", small, tmp_path, SAYS, "train")
    critic = with_rows(sort4 / "model", tmp_path / "critic", 90)
    assert main(["train", config, f"model.critic_path={critic}", "--dry-run"]) == 0


def test_saved_trajectories_of_another_model_are_refused(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, small: Path, sort4: Path, tmp_path: Path
) -> None:
    """They hold ids that the model which is to learn from them has no rows for."""
    assert main(["train", str(grpo_config), "trainer.steps=1"]) == 0
    most = max(drawn(tmp_path / "run/trajectories"))
    fewer = with_rows(sort4 / "model", tmp_path / "fewer", most)
    replay = [f"trainer.run_dir={tmp_path}/again", "--debug-train", str(tmp_path / "run/trajectories")]
    assert main(["train", str(grpo_config), f"model.path={fewer}", *replay]) == 2
    saved = tmp_path / "run/trajectories/step_000001.parquet"
    said = f"has rows for {most} token ids (vocab_size), and --debug-train {saved}"
    assert f"{said} has id {most} (" in capsys.readouterr().err
