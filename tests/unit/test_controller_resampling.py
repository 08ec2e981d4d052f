"""Dynamic sampling: exactly the informative groups train, the batch is full, what was generated in vain is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tandem import signals
from tandem.config.tree import TrainConfig
from tandem.controller.admission import RolloutRules
from tandem.controller.rollouts import RolloutProducer
from tandem.controller.timesharing import TimeSharing
from tandem.controller.worker_groups import Future
from tandem.errors import RewardShareExceeded, StepGivenUp
from tandem.reward.manager import RewardManager
from tandem.types import Group, Prompt, SavedGroup, Status, Trajectory
from tandem.workers.rollout import Advance, Ask, seeded_request

REWARD = """
import time

def compute_score(completion, ground_truth):
    if completion == "9":
        time.sleep(3600)
    if completion == "2":
        open(__file__.replace("reward.py", "judge"))
    return float(completion)
"""


class Rollout:
    """One engine, which answers sample s of prompt p with the s-th word of the prompt, greedily with 7."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def room(self) -> Future[list[int]]:
        return Future(lambda: [100], self.due.append)

    def advance(self, asks: Mapping[int, Mapping[int, Ask]], patience_s: float) -> Future[dict[int, Advance]]:
        done = [(number, *self.answers(ask)) for number, ask in asks[0].items()]
        return Future(lambda: {0: Advance(done, 100, tokens=1)}, self.due.append)

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
    size, samples = settings.data.prompts_per_step, settings.algorithm.group_size
    rules = RolloutRules(size, samples, steps, max_replaced=settings.algorithm.resample_rounds * size)
    with closing(RewardManager(settings.reward)) as reward:
        producer = make_producer(rules, reward, prompts, with_greedy)
        for step in range(1, steps + 1):
            groups = producer.take(step)
            producer.publish(step)
        counts = producer.metrics()
    return groups, {name.rpartition("/")[2]: value for name, value in counts.items() if "resample" in name}


def make_producer(
    rules: RolloutRules, reward: RewardManager, prompts: Sequence[str], with_greedy: bool
) -> RolloutProducer:
    rollout = Rollout()

    def watch() -> None:
        due, rollout.due = rollout.due, []
        for callback in due:
            callback()
        reward.poll()

    def ask(draw: int) -> Ask:
        prompt = Prompt(draw, np.zeros(1, np.int32), prompts[draw], "test", "", {})
        return Ask(seeded_request(prompt, 2, draw), with_greedy)

    return RolloutProducer(rules, rollout, reward, TimeSharing(rollout, lambda version: None), watch, ask)


def texts(groups: list) -> list[str]:
    return [group.trajectories[0].prompt.text for group in groups]


def test_exactly_the_uninformative_groups_are_replaced(settings: TrainConfig) -> None:
    """All right, all wrong and mixed groups; the fifth prompt replaces the first one, the sixth the third."""
    groups, counts = run(settings, "1 1", "0 1", "0 0", "1 1", "1 0", "0.5 1", "never asked")
    assert texts(groups) == ["0 1", "1 0", "0.5 1"]
    assert counts == {"replaced": 3, "uninformative": 0}


def test_after_so_many_the_step_is_filled_all_the_same(settings: TrainConfig) -> None:
    """Two rounds of three prompts may be replaced."""
    groups, counts = run(settings, *["1 1"] * 6, "0 0", "0 1", "4 4")
    assert texts(groups) == ["0 0", "0 1", "4 4"]
    assert counts == {"replaced": 6, "uninformative": 2}


def test_each_step_begins_to_count_anew(settings: TrainConfig) -> None:
    groups, counts = run(settings, *["1 1"] * 6, "0 0", "0 1", "4 4", "3 3", "0 1", "0 4", "0 3", steps=2)
    assert texts(groups) == ["0 1", "0 4", "0 3"]
    assert counts == {"replaced": 1, "uninformative": 0}


def test_without_it_every_group_is_kept(settings: TrainConfig) -> None:
    algorithm = settings.algorithm.model_copy(update={"resample_rounds": 0})
    groups, counts = run(settings.model_copy(update={"algorithm": algorithm}), "1 1", "0 1", "0 0")
    assert texts(groups) == ["1 1", "0 1", "0 0"] and counts == {}


def patient(settings: TrainConfig, timeout_s: float) -> tuple[RolloutRules, RewardManager]:
    """Without dynamic sampling, three prompts of two answers a step."""
    rules = RolloutRules(3, 2, 1)
    return rules, RewardManager(settings.reward.model_copy(update={"timeout_s": timeout_s}))


def test_a_step_ends_once_its_share_is_bound_to_be_exceeded(settings: TrainConfig) -> None:
    """One of five may fail: after two of six time-outs, at the latest the fourth, nothing can change it."""
    rules, manager = patient(settings, 0.4)
    with closing(manager) as reward:
        producer = make_producer(rules, reward, ["1 9", "9 9", "9 9"], False)
        with pytest.raises(
            RewardShareExceeded, match=r"[234] of 6 trajectories lost.*\n(.|\n)* not waited for"
        ) as raised:
            producer.take(1)
    scores = [score for group in raised.value.groups for score in group.scores]
    assert [score.value for score in scores[:2]] == [1.0, None] and len(scores) == 6
    assert {score.failure for score in scores[1:]} == {Status.REWARD_TIMEOUT, Status.NOT_SCORED}


def test_a_run_that_is_to_stop_gives_up_scores_that_do_not_come(
    settings: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "REWARDS_S", 0.1)
    rules, manager = patient(settings, 3600.0)
    stop = signals.StopRequest()
    with closing(manager) as reward, stop.listening():
        producer = make_producer(rules, reward, ["1 0", "9 9", "1 0"], False)
        stop.ask("enough")
        with pytest.raises(StepGivenUp):
            producer.take(1)
        kept = producer.finished()
        assert {number: len(one.group.scores) for number, one in kept.items()} in (
            {0: 2, 1: 0, 2: 0},
            {0: 0, 1: 0, 2: 0},
        )
        assert not reward.connections() or kept, "what hangs keeps nobody waiting"


def test_a_wait_for_all_scores_is_given_up_as_well(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a validation; what is asked for after it is scored by a worker that is free."""
    monkeypatch.setattr(signals, "REWARDS_S", 0.1)
    config = settings.reward.model_copy(update={"timeout_s": 3600.0, "workers": 2})
    prompt, stop = Prompt(0, np.zeros(1, np.int32), "9 1", "test", "", {}), signals.StopRequest()
    with closing(RewardManager(config)) as reward:
        with stop.listening(), pytest.raises(StepGivenUp):
            stop.ask("enough")
            reward.score([[answer(prompt, 0, False)]])
        assert [score.value for score in reward.score([[answer(prompt, 1, False)]])[0].scores] == [1.0]


def test_greedy_answers_are_scored_where_they_are_needed(settings: TrainConfig) -> None:
    groups, _ = run(settings, "1 0", "0 1", "4 1", with_greedy=True)
    assert [group.greedy.value for group in groups] == [7.0] * 3
    assert [len(group.trajectories) for group in groups] == [2] * 3


def test_what_failed_is_scored_again_where_a_run_goes_on(settings: TrainConfig, tmp_path: Path) -> None:
    """The judge of answer 2 is there only after the run has stopped for it."""
    prompts = ["0 1", "0 1", "0 1", "0 1", "1 2", "1 0"]
    rules = RolloutRules(3, 2, total_steps=2, max_staleness=1, partial_rollouts=False)
    rewards = settings.reward.model_copy(update={"max_error_share": 0.0})
    with closing(RewardManager(rewards)) as reward:
        producer = make_producer(rules, reward, prompts, with_greedy=True)
        producer.take(1)
        producer.publish(1)
        finished = producer.finished()
        assert {draw: len(one.group.scores) for draw, one in finished.items()} == {3: 2, 4: 0, 5: 2}
        assert finished[4].greedy is not None and finished[3].greedy is None
        with pytest.raises(RewardShareExceeded):
            producer.take(2)
        (tmp_path / "judge").touch()
        resumed = make_producer(rules, reward, prompts, with_greedy=True)
        resumed.resume(1, 3, finished)
        groups = resumed.take(2)
    assert [[score.value for score in group.scores] for group in groups] == [[0, 1], [1, 2], [1, 0]]
    assert [group.greedy.value for group in groups] == [7.0] * 3
    assert all(group.trajectories is finished[draw].group.trajectories for draw, group in enumerate(groups, 3))


def test_what_a_checkpoint_has_of_a_dropped_draw_is_replaced_at_once(settings: TrainConfig) -> None:
    """Draws 3 to 8 are admitted, and in the place of the first of them draw 9, before anything is answered."""
    rules = RolloutRules(3, 2, total_steps=3, max_staleness=1, max_replaced=3)
    with closing(RewardManager(settings.reward)) as reward:
        producer = make_producer(rules, reward, ["0 1"] * 20, with_greedy=False)
        prompt = Prompt(3, np.zeros(1, np.int32), "1 1", "test", "", {})
        dropped = SavedGroup(Group([answer(prompt, sample, False) for sample in range(2)], []), kept=False)
        producer.resume(1, 3, {3: dropped})
        producer._go_on()
        assert producer._engines.unanswered == 6
        assert texts(producer.take(2)) == ["0 1"] * 3 and producer.cursor == 7
