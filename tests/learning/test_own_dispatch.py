"""A run whose model has a worker class that dispatches data-parallel methods otherwise is the usual run."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import Role
from tandem.errors import WorkerError
from tandem.jobs.trainer import Trainer
from tandem.tracking.jsonl import read_metrics
from tandem.workers.registration import Dispatch, register
from tandem.workers.training import TrainWorker


class OnRankZero(TrainWorker):
    """Rank 0 is called alone, with all rows."""

    @register(Dispatch.RANK_ZERO)
    def logprobs(self, *arguments: Any) -> Any:
        return super().logprobs(*arguments)

    @register(Dispatch.RANK_ZERO)
    def values(self, *arguments: Any) -> Any:
        return super().values(*arguments)

    @register(Dispatch.RANK_ZERO)
    def learn(self, *arguments: Any) -> Any:
        return super().learn(*arguments)


class AnswersLess(TrainWorker):
    @register(Dispatch.RANK_ZERO)
    def logprobs(self, *arguments: Any) -> Any:
        return super().logprobs(*arguments)[:-1]


def test_a_column_of_another_length_is_refused_before_anything_learns(grpo_config: Path, tmp_path: Path) -> None:
    config = load_config(
        TrainConfig, grpo_config, ["algorithm.minibatches=2", "trainer.steps=1", "trainer.eval_every=0"]
    )
    with pytest.raises(WorkerError, match="a column by token was answered with"):
        Trainer(config, workers={Role.Actor: AnswersLess}).fit()


def test_columns_of_a_method_that_is_dispatched_otherwise_are_those_of_the_batch(
    grpo_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def length(completion):\n    return float(len(completion) % 3)\n")
    settings = [
        f"reward.functions=[{tmp_path}/reward.py:length]",
        "algorithm={type: ppo, minibatches: 2, kl: {place: loss}}",
        "training.optimizer.lr=0.01",
        "trainer.steps=2",
        "trainer.eval_every=0",
    ]
    found: list[list[dict[str, Any]]] = []
    roles = (Role.Actor, Role.Critic, Role.RefPolicy)
    for name, kinds in (("usual", {}), ("own", dict.fromkeys(roles, OnRankZero))):
        run = tmp_path / name
        config = load_config(TrainConfig, grpo_config, [*settings, f"trainer.run_dir={run}"])
        assert Trainer(config, workers=kinds).fit()
        found.append(
            [
                {name: value for name, value in step.items() if not name.startswith(("time/", "perf/"))}
                for step in read_metrics(run / "metrics.jsonl")
            ]
        )
    usual, own = found
    assert len(usual) == 2 and usual == own
    assert usual[-1]["actor/ratio/mean"] != 1, "one of two optimizer steps has moved away from the old policy"
