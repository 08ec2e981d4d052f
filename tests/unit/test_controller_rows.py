"""Data rows stay with the controller, and are in the trajectories that it gets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.jobs.inputs import read_inputs
from tandem.jobs.rl import RlJob
from tandem.jobs.trainer import Role
from tandem.reward.manager import RewardManager
from tandem.types import SamplingParams, Trajectory
from tandem.workers.registration import Calls
from tandem.workers.rollout import RolloutRequest, RolloutWorker

SEEN: list[Any] = []


class RecordingCluster(InlineCluster):
    """Keeps what the engines are asked."""

    def submit(self, name: str, method: str, calls: Calls) -> Any:
        if method in ("advance", "generate_for_eval"):
            arguments = [arguments.args[0] for arguments in calls.values()]
            SEEN.extend(each for asked in arguments for each in (asked.values() if method == "advance" else asked))
        return super().submit(name, method, calls)


class ReadsRows(RolloutWorker):
    async def answer(self, request: RolloutRequest, sampling: SamplingParams) -> list[Trajectory]:
        assert request.prompt.row and request.prompt.ground_truth and request.prompt.text
        return await super().answer(request, sampling)


@pytest.mark.parametrize("kind", [RolloutWorker, ReadsRows])
def test_engines_get_rows_where_they_may_read_them(
    grpo_config: Path, tmp_path: Path, kind: type[RolloutWorker]
) -> None:
    SEEN.clear()
    (tmp_path / "row.py").write_text(
        "def of(completion, ground_truth, prompt):\n    return len(prompt) / len(ground_truth)\n"
    )
    overrides = ["generation.eval.samples=2", f"reward.functions=['{tmp_path}/row.py:of']"]
    config = load_config(TrainConfig, grpo_config, overrides)
    inputs = read_inputs(config, RLHFDataset)
    assert inputs.train is not None
    placement = Placement(RecordingCluster(), pools_of(config), {Role.Rollout: kind})
    with closing(RewardManager(config.reward, config.trainer.seed)) as reward:
        config.trainer.run_dir.mkdir()
        job = RlJob(config, inputs, placement, reward)
        with closing(job):
            metrics = job.evaluate(0)
            assert metrics["val/sort4/unscored"] == 0
            assert job.step(1)["reward/mean"] > 0, "its reward is of the row alone"
    requests = [each.request if hasattr(each, "request") else each for each in SEEN]
    rows = [bool(request.prompt.row or request.prompt.ground_truth or request.prompt.text) for request in requests]
    assert len(rows) >= len(inputs.val or ()) + 4 and set(rows) == {kind is ReadsRows}
