"""Dynamic sampling: exactly the informative groups train, the batch is full, what was generated in vain is counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tandem.config.tree import TrainConfig
from tandem.controller.groups import Future
from tandem.controller.rollouts import RolloutProducer, RolloutRules
from tandem.controller.timesharing import UnsharedDevices
from tandem.reward.manager import RewardManager
from tandem.types import Prompt, Status, Trajectory
from tandem.workers.rollout import Advance, Ask, seeded_request

REWARD = "def compute_score(completion, ground_truth):\n    return float(completion)\n"


class Rollout:
    """One engine, which answers sample s of prompt p with the s-th word of the prompt, greedily with 7."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def room(self) -> Future[list[int]]:
        return Future(lambda: [100], self.due.append)

    def advance(self, asks: list, patience_s: float) -> Future[list]:
        done = [(number, *self.answers(ask)) for number, ask in asks[0].items()]
        return Future(lambda: [Advance(done, 100)], self.due.append)

    def answers(self, ask: Ask) -> tuple[list[Trajectory], Trajectory | None]:
        prompt, samples = ask.request.prompt, range(len(ask.request.seeds))
        greedy = answer(prompt, 0, True) if ask.with_greedy else None
        return [answer(prompt, sample, False) for sample in samples], greedy


def answer(prompt: Prompt, sample: int, greedy: bool) -> Trajectory:
    text = "7" if greedy else prompt.text.split()[sample]
    ids = np.zeros(1, np.int32)
    return Trajectory(prompt, sample, ids, np.ones(1, np.bool_), np.zeros(1, np.float32), ids, text, Status.COMPLETED)


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


def run(settings: TrainConfig, *prompts: str, steps: int = 1, with_greedy: bool = False) -> tuple[list, dict]:
    """The groups of the last step, and its counts."""
    rollout, size, samples = Rollout(), settings.data.prompts_per_step, settings.algorithm.group_size
    rules = RolloutRules(size, samples, steps, max_replaced=settings.algorithm.resample_rounds * size)

    def watch() -> None:
        due, rollout.due = rollout.due, []
        for callback in due:
            callback()
        reward.turn()

    def ask(draw: int) -> Ask:
        prompt = Prompt(draw, np.zeros(1, np.int32), prompts[draw], "test", "", {})
        return Ask(seeded_request(prompt, samples, draw), with_greedy)

    with closing(RewardManager(settings.reward)) as reward:
        producer = RolloutProducer(rules, rollout, reward, UnsharedDevices(lambda version: None), watch, ask)
        for step in range(1, steps + 1):
            groups = producer.take(step)
            producer.publish(step)
        counts = producer.metrics()
    return groups, {name.rpartition("/")[2]: value for name, value in counts.items() if "resample" in name}


def texts(groups: list) -> list[str]:
    return [group.trajectories[0].prompt.text for group in groups]


def test_exactly_the_uninformative_groups_are_replaced(settings: TrainConfig) -> None:
    """All right, all wrong and mixed groups; the fifth prompt replaces the first one, the sixth the third."""
    groups, counts = run(settings, "1 1", "0 1", "0 0", "1 1", "1 0", "0.5 1", "never asked")
    assert texts(groups) == ["0 1", "1 0", "0.5 1"]
    assert counts == {"replaced": 3, "uninformative": 0}


def test_after_so_many_the_step_is_filled_all_the_same(settings: TrainConfig) -> None:
    """Two rounds of three prompts may be replaced."""
    groups, counts = run(settings, *["1 1"] * 6, "0 0", "0 1", "2 2")
    assert texts(groups) == ["0 0", "0 1", "2 2"]
    assert counts == {"replaced": 6, "uninformative": 2}


def test_each_step_begins_to_count_anew(settings: TrainConfig) -> None:
    groups, counts = run(settings, *["1 1"] * 6, "0 0", "0 1", "2 2", "3 3", "0 1", "0 2", "0 3", steps=2)
    assert texts(groups) == ["0 1", "0 2", "0 3"]
    assert counts == {"replaced": 1, "uninformative": 0}


def test_without_it_every_group_is_kept(settings: TrainConfig) -> None:
    algorithm = settings.algorithm.model_copy(update={"resample_rounds": 0})
    groups, counts = run(settings.model_copy(update={"algorithm": algorithm}), "1 1", "0 1", "0 0")
    assert texts(groups) == ["1 1", "0 1", "0 0"] and counts == {}


def test_greedy_answers_are_scored_where_they_are_needed(settings: TrainConfig) -> None:
    groups, _ = run(settings, "1 0", "0 1", "2 1", with_greedy=True)
    assert [group.greedy.value for group in groups] == [7.0] * 3
    assert [len(group.trajectories) for group in groups] == [2] * 3
