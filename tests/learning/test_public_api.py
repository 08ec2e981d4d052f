"""Runs started from Python, with nothing but `import tandem`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.errors import WorkerLost
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tests.conftest import ROOT


def test_a_trainer_runs_what_the_command_line_does(grpo_config: Path, tmp_path: Path) -> None:
    assert tandem.Trainer(grpo_config).fit()
    assert [record["step"] for record in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


def test_train_knows_the_kind_of_training_by_its_configuration(sort4: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{number} ", "chosen": "2", "rejected": "3"} for number in range(4)]
    demonstrations = [{"prompt": f"{number} ", "completion": "2"} for number in range(4)]
    for kind, rows, metric in (
        (tandem.SftConfig, demonstrations, "sft/loss"),
        (tandem.DpoConfig, pairs, "dpo/loss"),
        (tandem.RewardModelConfig, pairs, "reward_model/loss"),
    ):
        run_dir, data = tmp_path / kind.__name__, tmp_path / f"{kind.__name__}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {"model": {"path": sort4 / "model"}, "data": {"train_files": [data], "rows_per_step": 4}}
        config = kind.model_validate({**tree, "trainer": {"run_dir": run_dir, "steps": 1}})
        assert tandem.train(config)
        assert metric in read_metrics(run_dir / "metrics.jsonl")[-1]


def test_every_mistake_is_told_before_anything_starts(grpo_config: Path, tmp_path: Path) -> None:
    wrong = ["data.train_files=[nowhere.parquet]", f"reward.functions=[{ROOT}/nowhere.py:score]"]
    config = tandem.load_config(tandem.TrainConfig, grpo_config, wrong)
    with pytest.raises(tandem.UserError, match=r"(?s)nowhere\.parquet.*nowhere\.py"):
        tandem.train(config)
    assert not (tmp_path / "run").exists()


class Constant(tandem.RewardManager):
    """Overrides `score`, and not `submit`."""

    def score(self, siblings: Sequence[list[tandem.Trajectory]], step: int = 0) -> list[tandem.Group]:
        groups = super().score(siblings, step)
        return [replace(group, scores=[tandem.Score(100.0 + step) for _ in group.scores]) for group in groups]


@pytest.mark.parametrize("k", [0, 2])
def test_the_score_of_a_reward_manager_of_ones_own_is_what_trains(grpo_config: Path, tmp_path: Path, k: int) -> None:
    config = tandem.load_config(tandem.TrainConfig, grpo_config, [f"trainer.max_staleness={k}"])
    assert tandem.Trainer(config, reward=Constant(config.reward, config.trainer.seed)).fit()
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [record["reward/mean"] for record in records] == [101.0, 102.0, 103.0]


def test_only_who_overrides_score_alone_is_asked_by_the_step(grpo_config: Path) -> None:
    class Both(tandem.RewardManager):
        score, submit = tandem.RewardManager.score, tandem.RewardManager.submit

    class ScoreOfBoth(Both):
        score = tandem.RewardManager.score

    class Other(ScoreOfBoth):
        submit = tandem.RewardManager.submit

    class Closing(tandem.RewardManager):
        def close(self) -> None:
            super().close()

    settings = tandem.load_config(tandem.TrainConfig, grpo_config).reward
    for kind in (tandem.RewardManager, Both, ScoreOfBoth, Other, Closing, Constant):
        manager = kind(settings)
        assert manager.by_step is (kind in (ScoreOfBoth, Constant)), kind
        manager.close()


class Lengths:
    """What docs/python.md asks of rewards, and nothing else."""

    by_step = True

    def score(self, siblings: Sequence[list[tandem.Trajectory]], step: int = 0) -> list[tandem.Group]:
        return [tandem.Group(group, [tandem.Score(float(len(one.text))) for one in group]) for group in siblings]

    def check_share(self, groups: Iterable[tandem.Group]) -> None:
        assert all(score.value is not None for group in groups for score in group.scores)


@pytest.mark.parametrize("k", [0, 1])
def test_a_by_step_reward_needs_to_score_and_to_check_alone(grpo_config: Path, tmp_path: Path, k: int) -> None:
    settings = [f"trainer.max_staleness={k}", "trainer.eval_every=3"]
    config = tandem.load_config(tandem.TrainConfig, grpo_config, settings)
    assert tandem.Trainer(config, reward=Lengths(), val_reward=Lengths()).fit()
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert all(record["reward/mean"] > 0 for record in records if record["step"])
    assert records[-1]["val/sort4/reward/mean@4"] > 0


class Repeating(tandem.RolloutWorker):
    """Its answers all have the text `7777`."""

    async def answer(self, request: tandem.RolloutRequest, sampling: tandem.SamplingParams) -> list[tandem.Trajectory]:
        return [replace(one, text="7777") for one in await super().answer(request, sampling)]


def test_answers_of_a_rollout_of_ones_own_are_trained_and_validated(grpo_config: Path, tmp_path: Path) -> None:
    config = tandem.load_config(tandem.TrainConfig, grpo_config, ["trainer.eval_every=3"])
    assert tandem.Trainer(config, workers={tandem.Role.Rollout: Repeating}).fit()
    for kind in ("trajectories", "validation"):
        (*_, last) = sorted((tmp_path / "run" / kind).glob("*.parquet"))
        assert {*read_trajectories(last)["response"].to_pylist()} == {"7777"}


class Losing(tandem.RolloutWorker):
    """Lives, and never answers."""

    async def answer(self, request: tandem.RolloutRequest, sampling: tandem.SamplingParams) -> list[tandem.Trajectory]:
        return await asyncio.Event().wait() or []  # type: ignore[return-value]


def test_an_engine_that_lives_and_never_answers_ends_the_run(grpo_config: Path) -> None:
    config = tandem.load_config(
        tandem.TrainConfig, grpo_config, ["cluster.timeout_s=0.5", "data.val_files=[]", "trainer.max_restarts=0"]
    )
    with pytest.raises(WorkerLost, match=r"engine 0 has run for .* \(cluster.timeout_s: 0.5\)"):
        tandem.Trainer(config, workers={tandem.Role.Rollout: Losing}).fit()


class Generating(tandem.RolloutWorker):
    def generate(self, *arguments: Any) -> Any:
        return super().generate(*arguments)


class GeneratingAndRepeating(Generating, Repeating):
    """What a dataflow of one's own and a Trainer call."""


def test_a_rollout_that_overrides_what_a_trainer_does_not_call_is_refused(grpo_config: Path, tmp_path: Path) -> None:
    told = r"Generating overrides RolloutWorker.generate, which a Trainer does not call.*override `async def answer"
    with pytest.raises(tandem.UserError, match=told):
        tandem.Trainer(grpo_config, workers={tandem.Role.Rollout: Generating})
    with pytest.raises(tandem.UserError, match=told):
        tandem.RayPPOTrainer(grpo_config, role_worker_mapping={tandem.Role.Rollout: Generating})
    tandem.Trainer(grpo_config, workers={tandem.Role.Rollout: GeneratingAndRepeating})
    assert not (tmp_path / "run").exists()
