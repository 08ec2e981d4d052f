"""RewardManager: from siblings to scores, metrics, and the share of failures a run survives."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.activity import begin, current
from tandem.config.reward import RewardConfig
from tandem.errors import RewardShareExceeded, UserError
from tandem.reward.manager import RewardManager, ending_early, metrics
from tandem.types import Group, Prompt, Score, Status, Trajectory

SOURCE = """
import random, time

def right(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "raise":
        raise ValueError("cannot score " + str(extra_info))
    right = solution_str == ground_truth
    return {"score": right, "acc": right, "pred": solution_str, "length": len(solution_str)}

def longest(prompts, completions, **columns):
    longest = max(map(len, completions))
    return [None if c == "n/a" else len(c) == longest for c in completions]

def only_answers(completions):
    return [None if c == "n/a" else 1.0 for c in completions]

def draw(completion):
    return random.random()

async def short(completion, ground_truth, **row):
    return {"score": -len(completion), "acc": 0.125, "words": len(completion.split())}
"""
Start = Callable[..., RewardManager]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def start(file: Path) -> Iterator[Start]:
    started: list[RewardManager] = []

    def start(*functions: Any, seed: int = 0, **config: Any) -> RewardManager:
        named = [
            f"{file}:{f}" if isinstance(f, str) else {"function": f"{file}:{f[0]}", "weight": f[1]} for f in functions
        ]
        config = {"functions": named, "workers": 1, "timeout_s": 2, **config}
        started.append(RewardManager(RewardConfig(**config), seed=seed))
        return started[-1]

    yield start
    for manager in started:
        manager.close()


def siblings(
    *texts: str, index: int = 0, source: str = "sums", truth: str = "4", aborted: str = ""
) -> list[Trajectory]:
    none = np.zeros(0, np.int32)
    prompt = Prompt(index, none, "2 + 2?", source, truth, {"extra_info": {"index": index}})
    return [
        Trajectory(
            prompt=prompt,
            sample=sample,
            response_ids=none,
            loss_mask=none.astype(np.bool_),
            rollout_logprobs=none.astype(np.float32),
            versions=none,
            text=text,
            status=Status.ABORTED if text == aborted else Status.COMPLETED,
        )
        for sample, text in enumerate(texts)
    ]


def turn_until_idle(manager: RewardManager) -> None:
    while manager.connections():
        wait(manager.connections(), 1)
        manager.poll()


def values(group: Group) -> list[float | None]:
    return [score.value for score in group.scores]


def test_one_function_gives_value_parts_and_prediction(start: Start) -> None:
    group, second = start("right").score([siblings("4", "55"), siblings("6", index=1, truth="6")])
    assert [s.value for s in group.scores] == [1.0, 0.0]
    assert group.scores[1].parts == {"acc": 0.0, "length": 2.0}
    assert [s.prediction for s in group.scores] == ["4", "55"]
    assert [s.value for s in second.scores] == [1.0]
    assert [t.text for t in group.trajectories] == ["4", "55"]
    assert all(s.seconds > 0 for s in group.scores)


def test_several_functions_are_a_weighted_sum(start: Start) -> None:
    manager = start(("right", 2.0), "longest", ("short", 0.5))
    (group,) = manager.score([siblings("4", "5 5")])
    # right: 1 0, longest: 0 1, short: -1 -3
    assert [s.value for s in group.scores] == [2.0 + 0.0 - 0.5, 0.0 + 1.0 - 1.5]
    assert group.scores[1].parts == {
        "right": 0.0,
        "length": 3.0,
        "longest": 1.0,
        "short": -3.0,
        "words": 2.0,
        "acc": 0.0,
    }
    assert group.scores[0].prediction == "4"


def test_none_means_not_applicable(start: Start) -> None:
    (group,) = start("longest", "only_answers").score([siblings("4", "n/a")])
    assert group.scores[0].value == 1.0 and group.scores[0].failure is None
    assert (group.scores[1].value, group.scores[1].failure) == (None, Status.NOT_SCORED)
    (group,) = start("longest", "short").score([siblings("4444", "n/a")])
    assert [s.value for s in group.scores] == [1.0 - 4.0, -3.0]
    assert "longest" not in group.scores[1].parts


def test_aborted_trajectories_are_not_sent(start: Start) -> None:
    groups = start("longest").score([siblings("4", "cut off", aborted="cut off"), siblings("off", aborted="off")])
    assert [[s.value for s in group.scores] for group in groups] == [[1.0, None], [None]]
    assert groups[0].scores[1].failure is Status.NOT_SCORED


def test_failures_are_never_zero_and_each_is_shown_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    manager = start("right", "short")
    with caplog.at_level(logging.ERROR, logger="tandem.reward"):
        groups = manager.score([siblings("4", "raise", "hang", index=i) for i in range(2)])
        manager.score([siblings("raise")])
    assert [s.value for s in groups[1].scores] == [0.0, None, None]
    assert [s.failure for s in groups[1].scores] == [None, Status.REWARD_ERROR, Status.REWARD_TIMEOUT]
    error = str(groups[1].scores[1].error)
    assert error.startswith("reward function ") and ":right' on row 1, sample 1: failed\n" in error
    assert "cannot score {'index': 1}" in error
    assert "row 1, sample 2: took longer than" in str(groups[1].scores[2].error)
    assert [record.getMessage().count("row 0") for record in caplog.records] == [1, 1]
    assert "Traceback" in caplog.records[0].getMessage()


def test_stochastic_rewards_repeat(start: Start) -> None:
    def draws(manager: RewardManager, step: int) -> list[float | None]:
        return [s.value for g in manager.score([siblings("a", "b"), siblings("c", index=1)], step) for s in g.scores]

    manager = start("draw")
    first = draws(manager, step=1)
    assert len(set(first)) == 3
    assert draws(manager, step=1) == first
    assert draws(manager, step=2) != first
    assert draws(start("draw", seed=1), step=1) != first
    assert draws(start("draw", workers=2), step=1) == first


def test_built_in_rewards_go_by_data_source(start: Start) -> None:
    manager = start()
    (group,) = manager.score([siblings("#### 1,000", "1000", source="openai/gsm8k", truth="1000")])
    assert [s.value for s in group.scores] == [1.0, 0.0]
    with pytest.raises(UserError, match=r"no built-in reward for data_source .'sums'"):
        manager.score([siblings("4")])


def test_bad_references_raise_before_any_process() -> None:
    with pytest.raises(UserError, match="there is no file"):
        RewardManager(RewardConfig(functions=["nowhere.py:f"]))


def test_prompts_alike_in_a_column_are_scored_together(file: Path, start: Start) -> None:
    function = {"function": f"{file}:longest", "score_together": "extra_info.index"}
    manager = start(functions=[function, f"{file}:short"])
    groups = [siblings("4", "55"), siblings("666", "7"), siblings("8", index=1)]
    scored = manager.score(groups)
    assert [[s.parts["longest"] for s in group.scores] for group in scored] == [[0.0, 0.0], [1.0, 0.0], [1.0]]
    assert [[s.parts["short"] for s in group.scores] for group in scored] == [[-1.0, -2.0], [-3.0, -1.0], [-1.0]]
    manager = start(functions=[{**function, "score_together": "extra_info.problem"}])
    with pytest.raises(UserError, match=r"score_together: extra_info\.problem, but data row 0 has no such column"):
        manager.score(groups)


@pytest.mark.parametrize("workers", [1, 2])
def test_groups_submitted_one_by_one_have_the_scores_of_the_step(start: Start, workers: int) -> None:
    groups = [siblings("4", "raise", "a", index=i) for i in range(6)] + [siblings("cut", aborted="cut")]
    manager = start("right", "draw", "longest", seed=3, workers=workers, timeout_s=20)
    expected = manager.score(groups, step=7)
    found: dict[int, list[Group]] = {}
    for number, group in enumerate(groups):
        manager.submit([group], 7, partial(found.__setitem__, number))
    assert not found and wait(manager.connections(), 0)
    turn_until_idle(manager)
    assert [values(found[number][0]) for number in range(7)] == [values(group) for group in expected]
    assert [found[number][0].trajectories for number in range(7)] == groups
    assert [values(group) for group in manager.score(groups, step=8)] != [values(group) for group in expected]


def test_a_submission_that_hangs_holds_no_other_back(start: Start) -> None:
    manager = start("right", workers=2, timeout_s=3600)
    done: list[str] = []
    texts = ["hang", *"abcde"]
    for text in texts:
        manager.submit([siblings(text, "4")], 1, lambda groups: done.append(groups[0].trajectories[0].text))
    while len(done) < 5:
        wait(manager.connections(), 1)
        manager.poll()
    (group,) = manager.score([siblings("4", "5")])
    assert sorted(done) == [*"abcde"] and values(group) == [1.0, 0.0]
    manager.close()
    manager.poll()
    assert len(done) == 5 and not manager.connections()


def test_a_submission_times_out_alone(start: Start) -> None:
    manager = start("right", workers=2)
    done: list[Group] = []
    for index, text in enumerate(["4", "hang", "4", "5"]):
        manager.submit([siblings("4", text, index=index)], 1, done.extend)
    turn_until_idle(manager)
    found = {group.trajectories[0].prompt.index: values(group) for group in done}
    assert found == {0: [1.0, 1.0], 1: [1.0, None], 2: [1.0, 1.0], 3: [1.0, 0.0]}


def test_submitted_groups_without_a_reward_raise_at_once(start: Start) -> None:
    manager = start()
    with pytest.raises(UserError, match=r"no built-in reward for data_source .'sums'"):
        manager.submit([siblings("4")], 1, lambda _: None)
    assert not manager.connections()


def test_only_functions_that_score_together_need_the_whole_step(file: Path, start: Start) -> None:
    together = {"function": f"{file}:longest", "score_together": "extra_info.index"}
    assert start(functions=[f"{file}:short", together]).by_step
    assert not start("short", "longest").by_step and not start().by_step


def hand_made(*scores: Score) -> Group:
    return Group(siblings(*["x"] * len(scores)), list(scores))


ERROR = Score(None, failure=Status.REWARD_ERROR, error="the traceback")
TIMEOUT = Score(None, failure=Status.REWARD_TIMEOUT, error="too slow")
NOT_SCORED = Score(None, failure=Status.NOT_SCORED)


def test_metrics_count_the_scored_only() -> None:
    groups = [
        hand_made(Score(3.0, {"acc": 1.0}), ERROR, TIMEOUT),
        hand_made(Score(1.0, {"acc": 0.0, "n": 7.0}), NOT_SCORED),
    ]
    assert metrics(groups) == {
        "reward/mean": 2.0,
        "reward/max": 3.0,
        "reward/min": 1.0,
        "reward/std": 1.0,
        "reward/acc": 0.5,
        "reward/n": 7.0,
        "reward/n/share": 0.5,
        "reward/errors": 1.0,
        "reward/timeouts": 1.0,
        "reward/not_scored": 1.0,
    }


@pytest.mark.parametrize("name", ["mean", "errors"])
def test_parts_may_not_take_the_names_of_statistics(name: str) -> None:
    with pytest.raises(UserError, match=rf"named \['{name}'\], which are metrics; rename them"):
        metrics([hand_made(Score(1.0, {name: 1.0}))])


def test_a_mean_over_some_answers_says_of_how_many_it_is() -> None:
    """Of those with a reward; a mean over all of them needs no share."""
    lacking = hand_made(Score(1.0, {"acc": 1.0, "n": 2.0}), Score(0.0, {"n": 4.0}), Score(0.0, {"n": 0.0}), ERROR)
    found = metrics([lacking])
    assert (found["reward/acc"], found["reward/acc/share"]) == (1.0, pytest.approx(1 / 3))
    assert found["reward/n"] == 2.0 and "reward/n/share" not in found
    with pytest.raises(UserError, match=r"named \['acc/share'\], which are metrics; rename them"):
        metrics([hand_made(Score(1.0, {"acc": 1.0, "acc/share": 1.0}), Score(1.0, {"acc/share": 1.0}), Score(1.0))])


def test_metrics_of_nothing_scored_are_counts() -> None:
    assert metrics([hand_made(ERROR)]) == {"reward/errors": 1.0, "reward/timeouts": 0.0, "reward/not_scored": 0.0}


def test_the_run_stops_above_the_error_share(start: Start) -> None:
    manager = start("draw", max_error_share=0.5)
    manager.check_share([hand_made(Score(1.0), ERROR, NOT_SCORED), hand_made(TIMEOUT)])
    manager.check_share([])
    with pytest.raises(RewardShareExceeded, match=r"3 of 5 .* = 0\.5.*\n.*the traceback"):
        manager.check_share([hand_made(Score(1.0), ERROR, NOT_SCORED), hand_made(TIMEOUT, ERROR)])


def test_a_run_in_which_nothing_ever_had_a_reward_ends(start: Start) -> None:
    manager = start("only_answers")
    nothing = manager.score([siblings("n/a", "n/a")])
    with pytest.raises(RewardShareExceeded, match=r"none of 2 traj.*only_answers returned None for all of them"):
        manager.check_share(nothing)
    manager.check_share(manager.score([siblings("4", "n/a")]))
    manager.check_share(nothing)  # the function does not apply to this step's rows
    called_off = start("only_answers").score([siblings("4", aborted="4")])
    with pytest.raises(RewardShareExceeded, match="generation was called off"):
        start("only_answers").check_share(called_off)


def test_scoring_ends_once_the_share_is_bound_to_be_exceeded(start: Start) -> None:
    """Of ten answers two may fail; the status line says how many are through."""
    manager = start("right", timeout_s=0.3)
    group = siblings("4", *["hang"] * 9)
    begin("rewards")
    with ending_early(), pytest.raises(RewardShareExceeded, match=r"3 of 10 traj(.|\n)*6 other answers were") as raised:
        manager.score([group])
    assert [score.failure for score in raised.value.groups[0].scores][1:] == [Status.REWARD_TIMEOUT] * 3 + [
        Status.NOT_SCORED
    ] * 6
    activity, _ = current()
    assert (activity.done, activity.total, activity.unit, activity.note) == (4, 10, "answers", ", 3 timed out")
    with ending_early(to_come=90):  # they may all have a reward
        assert len(manager.score([siblings("4", "raise", "raise")])) == 1
    assert len(manager.score([siblings("raise", "raise")])) == 1


def test_what_is_under_way_is_no_reward_of_some_functions(start: Start) -> None:
    manager = start("right", "only_answers", timeout_s=3600.0)
    group, done = siblings("hang"), list[Group]()
    manager.submit([group], 1, done.extend)
    begin("rewards")
    for _ in range(5):
        wait(manager.connections(), 0.2)
        manager.poll()
    assert manager.so_far(group).scores[0].failure is Status.NOT_SCORED and not done


def test_the_reason_for_a_low_reward_is_kept(start: Start, tmp_path: Path) -> None:
    source = "def {name}(completion): return {{'score': 0.0, 'reason': {reason!r}}}\n"
    path = tmp_path / "reasons.py"
    path.write_text(source.format(name="a", reason="no number") + source.format(name="b", reason=None))
    (group,) = start(functions=[f"{path}:a", f"{path}:b"]).score([siblings("4")])
    assert (group.scores[0].value, group.scores[0].failure, group.scores[0].error) == (0.0, None, "no number")
