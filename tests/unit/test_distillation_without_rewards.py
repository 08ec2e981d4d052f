"""Distillation that learns from its teacher alone needs nobody who scores; validation, and other algorithms, do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.config.load import load_config, read_config
from tandem.config.ratio import anchored_at_engine
from tandem.config.tree import TrainConfig

NO_FUNCTIONS = ["reward.functions=[]", "data.val_files=[]", "generation.eval.samples=1"]


def distilled(sort4: Path, *more: str) -> list[str]:
    return [*NO_FUNCTIONS, f"model.teacher_path={sort4}/model", "algorithm={type: on_policy_distillation}", *more]


@pytest.mark.parametrize("top_k", [0, 4])
def test_answers_that_nobody_scores_are_learned_from(
    grpo_config: Path, sort4: Path, tmp_path: Path, top_k: int
) -> None:
    """The teacher is the student itself, whose distribution is at no distance."""
    overrides = distilled(sort4, f"algorithm.top_k={top_k}", "trainer.steps=1", "training.skip_zero_advantage=false")
    assert main(["train", str(grpo_config), *overrides]) == 0
    (step,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert step["reward/not_scored"] == 4 and "reward/mean" not in step
    assert step["actor/trained_share"] > 0 and abs(step["teacher/kl"]) < 1e-3


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (["algorithm.reward_weight=1", "algorithm.group_size=2"], "reward.functions: no built-in reward"),
        (["data.val_files={sort4}/val.jsonl"], "reward.functions: no built-in reward"),
        (["algorithm={type: grpo}", "model.teacher_path=null"], "reward.functions: no built-in reward"),
    ],
)
def test_who_learns_from_rewards_or_validates_needs_a_function(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, sort4: Path, change: list[str], where: str
) -> None:
    overrides = distilled(sort4, *(one.replace("{sort4}", str(sort4)) for one in change))
    assert main(["train", str(grpo_config), *overrides, "--dry-run"]) == 2
    assert where in capsys.readouterr().err


def test_distributions_need_no_logprobs_of_the_weights_before_the_step(grpo_config: Path, sort4: Path) -> None:
    """With `top_k` the distance is the loss itself, of whichever answers: stale ones do."""
    stale = distilled(sort4, "trainer.max_staleness=1")
    (refused,) = read_config(TrainConfig, grpo_config, stale).problems
    assert refused.startswith("algorithm: type: on_policy_distillation needs the log-probs of the weights before the")
    taken = load_config(TrainConfig, grpo_config, [*stale, "algorithm.top_k=4"])
    assert anchored_at_engine(taken.algorithm, taken.trainer.max_staleness)
