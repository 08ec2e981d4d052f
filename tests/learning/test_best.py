"""The best checkpoint: by the highest or the lowest value of a metric that the run measures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.cli import main
from tandem.config.trainer import TrainerConfig
from tandem.jobs.best_checkpoint import BestValue
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT


def improvements(values: list[float], **trainer: str) -> list[bool]:
    """Which of the values, one after the other, is better than all before."""
    best = BestValue(TrainerConfig(run_dir=Path("r"), steps=1, **trainer))
    return [best.improves({trainer["best_metric"]: value}, step) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("metric", "lowest"),
    [
        ("val/loss", True), ("actor/kl", True), ("rollout/mismatch_kl", True), ("val/gsm8k/unscored", True),
        ("reward/errors", True), ("critic/vf_loss", True), ("val/gsm8k/acc/mean@1", False), ("reward/mean", False),
        ("val/margin", False), ("response_length/mean", False),
    ],
)  # fmt: skip
def test_which_value_is_best_follows_from_the_name(metric: str, lowest: bool) -> None:
    by_name = improvements([2.0, 3.0, 1.0, 1.0, 4.0], best_metric=metric)
    assert by_name == ([True, False, True, False, False] if lowest else [True, True, False, False, True])
    other = improvements([2.0, 3.0, 1.0], best_metric=metric, best_mode="max" if lowest else "min")
    assert other == ([True, True, False] if lowest else [True, False, True])


def test_what_is_no_number_is_never_best() -> None:
    assert improvements([math.nan, 1.0, math.nan, 2.0], best_metric="reward/mean") == [False, True, False, True]
    best = BestValue(TrainerConfig(run_dir=Path("r"), steps=1, best_metric="reward/mean"))
    assert not best.improves({"reward/max": 1.0}, 1)


def test_a_resumed_run_goes_on_comparing_the_same_metric() -> None:
    def trainer(metric: str) -> TrainerConfig:
        return TrainerConfig(run_dir=Path("r"), steps=1, best_metric=metric)

    before = BestValue(trainer("reward/mean"))
    before.improves({"reward/mean": 0.5}, 3)
    for metric, improves in (("reward/mean", False), ("reward/max", True)):
        after = BestValue(trainer(metric))
        after.load_state(before.state())
        assert after.improves({metric: 0.4}, 4) is improves
        assert after.step == (4 if improves else 3)


def test_where_the_best_checkpoint_is_gone_the_next_value_is_the_best() -> None:
    best = BestValue(TrainerConfig(run_dir=Path("r"), steps=1, best_metric="reward/mean"))
    best.improves({"reward/mean": 0.5}, 3)
    best.stands_at(3)
    assert not best.improves({"reward/mean": 0.4}, 4)
    best.stands_at(None)
    assert best.improves({"reward/mean": 0.4}, 4) and best.step == 4


def test_a_mode_needs_a_metric() -> None:
    with pytest.raises(ValidationError, match="best_mode: min, but there is no best_metric"):
        TrainerConfig(run_dir=Path("r"), steps=1, best_mode="min")


def test_the_lowest_validation_loss_is_kept(sort4: Path, tmp_path: Path) -> None:
    rows = (sort4 / "sft.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "val.jsonl").write_text("".join(rows[-64:]))
    files = [f"data.train_files=[{sort4}/sft.jsonl]", f"data.val_files=[{tmp_path}/val.jsonl]"]
    length = ["trainer.steps=4", "trainer.eval_every=1", "trainer.keep_last=1", "trainer.best_metric=val/loss"]
    where = [f"model.path={sort4}/model", f"trainer.run_dir={tmp_path}/run", "data.rows_per_step=16"]
    # The learning rate warms up to one that is far too large, so that the loss falls first and rises then.
    steps = ["training.optimizer={lr: 0.5, warmup_steps: 30}", *length]
    assert main(["sft", str(ROOT / "recipes/sort4_sft.yaml"), *where, *files, *steps]) == 0
    losses = {record["step"]: record["val/loss"] for record in read_metrics(tmp_path / "run/metrics.jsonl")}
    best = min(range(1, 5), key=lambda step: losses[step])
    assert (tmp_path / "run/checkpoints/best").read_text() == f"step_{best:06d}\n"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("reward/digit", "trainer.best_metric: reward/digit is not among the metrics of the first step"),
        ("val/sort4/acc/mean@4", "trainer.best_metric: val/sort4/acc/mean@4 is not among the metrics of the first val"),
    ],
)
def test_a_metric_that_the_rewards_do_not_return_ends_the_run_at_once(
    grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, said: str
) -> None:
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return {'score': 1.0, 'digits': 1.0}\n")
    reward = f"reward.functions=[{tmp_path}/reward.py:digits]"
    options = [f"trainer.best_metric={metric}", "trainer.eval_every=1"]
    assert main(["train", str(grpo_config), reward, *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run/checkpoints/latest").exists()
