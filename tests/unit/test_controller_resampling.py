"""Dynamic sampling: exactly the informative groups train, the batch is full, what was generated in vain is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.algorithms.base import Signal
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import ExperienceRoles
from tandem.controller.dataflow import Clock, generate_and_score
from tandem.controller.groups import Future
from tandem.controller.timesharing import UnsharedDevices
from tandem.reward.manager import RewardManager
from tandem.types import Prompt, Status, Trajectory

REWARD = "def compute_score(completion, ground_truth):\n    return float(completion)\n"


class Rollout:
    """A rollout group that answers sample s of prompt p with the s-th word of the prompt, greedily with 7."""

    def generate(self, requests: list, greedy: bool = False) -> Future[list[list[Trajectory]]]:
        answers = [[answer(r.prompt, s, greedy) for s in range(len(r.seeds))] for r in requests]
        return Future(lambda: answers, notify=[].append)


def answer(prompt: Prompt, sample: int, greedy: bool) -> Trajectory:
    text = "7" if greedy else prompt.text.split()[sample]
    ids = np.zeros(1, np.int32)
    return Trajectory(prompt, sample, ids, np.ones(1, np.bool_), np.zeros(1, np.float32), ids, text, Status.COMPLETED)


def batches(*steps: list[str]) -> Iterator[list[Prompt]]:
    number = iter(range(100))
    for texts in steps:
        yield [Prompt(next(number), np.zeros(1, np.int32), text, "test", "", {}) for text in texts]


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    (tmp_path / "reward.py").write_text(REWARD)
    return TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts_per_step": 3},
            "algorithm": {"type": "grpo", "group_size": 2, "resample_rounds": 2},
            "reward": {"functions": [f"{tmp_path}/reward.py:compute_score"], "workers": 1},
            "trainer": {"run_dir": "r", "steps": 1},
        }
    )


def run(settings: TrainConfig, *steps: list[str], needs: frozenset[Signal] = frozenset()) -> tuple[list, dict]:
    reward = RewardManager(settings.reward)
    try:
        groups, counts = generate_and_score(
            ExperienceRoles(Rollout(), reward, UnsharedDevices(lambda version: None)),
            settings,
            batches(*steps),
            1,
            Clock(),
            needs,
        )
    finally:
        reward.close()
    return groups, {name.rpartition("/")[2]: value for name, value in counts.items()}


def texts(groups: list) -> list[str]:
    return [group.trajectories[0].prompt.text for group in groups]


def test_uninformative_groups_are_replaced_until_the_batch_is_full(settings: TrainConfig) -> None:
    """All right, all wrong and mixed groups; the second round gives one mixed group too many."""
    groups, counts = run(settings, ["1 1", "0 1", "0 0"], ["1 0", "0 1", "0.5 1"], ["never 0", "asked 0", "0 1"])
    assert texts(groups) == ["0 1", "1 0", "0 1"]
    assert all(len({score.value for score in group.scores}) == 2 for group in groups)
    assert counts == {"rounds": 2, "unused": 2 * 3, "uninformative": 0}


def test_after_the_last_round_the_batch_is_filled_all_the_same(settings: TrainConfig) -> None:
    groups, counts = run(settings, *[["1 1", "0 0", "1 1"]] * 2, ["1 1", "0 1", "0 0"])
    assert texts(groups)[0] == "0 1" and len(groups) == 3
    assert counts == {"rounds": 3, "unused": 2 * 6, "uninformative": 2}


def test_without_it_every_group_is_kept(settings: TrainConfig) -> None:
    algorithm = settings.algorithm.model_copy(update={"resample_rounds": 0})
    groups, counts = run(settings.model_copy(update={"algorithm": algorithm}), ["1 1", "0 1", "0 0"])
    assert texts(groups) == ["1 1", "0 1", "0 0"] and counts == {}


def test_greedy_answers_are_scored_where_they_are_needed(settings: TrainConfig) -> None:
    groups, _ = run(settings, ["1 0", "0 1", "2 1"], needs=frozenset({Signal.GREEDY_REWARDS}))
    assert [group.greedy.value for group in groups] == [7.0] * 3
    assert [len(group.trajectories) for group in groups] == [2] * 3
