"""Models that have rows for more token ids than their tokenizer has tokens: such ids are never drawn, and have their
share in every log-prob, the engine's as the trainer's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.cli import main
from tandem.config.model import ModelConfig
from tandem.models.loading import load_tokenizer, never_drawn, rows_of_vocabulary, tokens_with_rows
from tandem.tracking.trajectories import read_groups

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
