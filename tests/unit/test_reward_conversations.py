"""What reward functions see of conversations, and what becomes of the rewards and failures of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.reward import RewardConfig
from tandem.controller.reward_model import ends_of_answers, without_functions
from tandem.controller.reward_reader import row_of_ids
from tandem.errors import RewardShareExceeded
from tandem.reward.functions import load
from tandem.reward.manager import RewardManager
from tandem.reward.manager import metrics as reward_metrics
from tandem.rollout.metrics import metrics
from tandem.types import Branch, Group, Message, Prompt, Score, Status, Trajectory, Turn

ASKED: list[Message] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "2 + 2?"}]
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
SAID: tuple[Message, ...] = (CALL, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"})
SOURCE = """
def turns(completion, turns):
    return len(turns) + (turns[-1]["content"] == "four") / 2

def roles(data_source, solution_str, ground_truth, messages, extra_info=None):
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    return {"score": len(messages), "calls": calls, "pred": " ".join(message["role"] for message in messages)}

def trl(completions, **columns):
    return [len(one) if isinstance(one, list) else -len(one) for one in completions]

def of_the_row(completion, turns, messages="none"):
    return turns + (messages == "none")

def changes(completion, messages):
    messages.clear()
    return 1.0

def fails(completion):
    raise ValueError(completion)
"""
Start = Callable[..., RewardManager]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "rewards.py").write_text(SOURCE)
    started: list[RewardManager] = []

    def start(*functions: str, **config: Any) -> RewardManager:
        named = [f"{tmp_path}/rewards.py:{name}" for name in functions]
        started.append(RewardManager(RewardConfig(functions=named, workers=1, **config)))
        return started[-1]

    yield start
    for manager in started:
        manager.close()


def conversation(*said: Message, row: dict[str, Any] | None = None, **more: Any) -> Trajectory:
    none = np.zeros(0, np.int32)
    prompt = Prompt(3, none, "<user>2 + 2?", more.pop("source", "sums"), "4", {"prompt": ASKED} if row is None else row)
    masks = (none.astype(np.bool_), none.astype(np.float32), none)
    settings: dict[str, Any] = {"text": "add4four", "status": Status.COMPLETED, **more}
    return Trajectory(prompt, 0, none, *masks, messages=said, **settings)


def values(manager: RewardManager, *siblings: Trajectory) -> list[float | None]:
    return [score.value for score in manager.score([list(siblings)])[0].scores]


def test_functions_see_messages_and_turns(start: Start) -> None:
    one_turn, plain = conversation(text="four"), conversation(row={"prompt": "2 + 2?"}, text="five")
    assert values(start("turns"), conversation(*SAID), one_turn, plain) == [2.5, 1.5, 1.0]
    (group,) = start("roles").score([[conversation(*SAID), one_turn, plain]])
    assert [score.value for score in group.scores] == [5.0, 3.0, 2.0]
    assert group.scores[0].prediction == "system user assistant tool assistant"
    assert [score.parts for score in group.scores] == [{"calls": 1.0}, {"calls": 0.0}, {"calls": 0.0}]


def test_trl_completions_are_messages_where_there_are_any(start: Start) -> None:
    text = {"prompt": "2 + 2?"}
    siblings = [conversation(*SAID, row=text), conversation(row=text, text="four")]
    assert values(start("trl"), *siblings) == [3.0, -4.0]
    assert values(start("trl"), conversation(*SAID), conversation(text="four")) == [3.0, 1.0]


def test_a_column_of_the_name_goes_first(start: Start) -> None:
    assert values(start("of_the_row"), conversation(*SAID, row={"turns": 7, "messages": "none"})) == [8.0]


def test_no_column_is_needed_for_them(start: Start, tmp_path: Path) -> None:
    start()
    assert load(f"{tmp_path}/rewards.py:turns").needed_columns() == []
    assert load(f"{tmp_path}/rewards.py:roles").needed_columns() == []


def test_messages_may_not_be_changed(start: Start) -> None:
    (group,) = start("changes").score([[conversation(*SAID)]])
    assert group.scores[0].failure is Status.REWARD_ERROR and "changed its arguments" in str(group.scores[0].error)
    assert len(group.trajectories[0].messages) == 3


def test_the_environment_gives_the_reward_where_there_is_no_function(start: Start) -> None:
    """Also where the row's data source has a function; a sibling to which it gave nothing is not scored."""
    lacking = conversation(*SAID, source="gsm8k")
    (group,) = start(environment_weight=7.0).score([[conversation(*SAID, reward=0.25, source="gsm8k"), lacking]])
    assert [score.value for score in group.scores] == [0.25, None]
    assert group.scores[0].parts == {"environment": 0.25} and group.scores[1].failure is Status.NOT_SCORED
    assert reward_metrics([group])["reward/environment"] == 0.25
    answered = conversation(*SAID[:2], {"role": "assistant", "content": "#### 4"}, source="gsm8k", text="…")
    assert values(start(), answered) == [1.0], "an environment without rewards"
    assert values(start(), conversation(*SAID)) == [None], "nor a function"


def test_the_environments_reward_is_added_to_that_of_functions(start: Start) -> None:
    (group,) = start("turns", environment_weight=2.0).score(
        [[conversation(*SAID, reward=0.5), conversation(*SAID), conversation(reward=0.0)]]
    )
    assert [score.value for score in group.scores] == [3.5, 2.5, 1.0]
    assert group.scores[0].parts == {"turns": 2.5, "environment": 0.5} and group.scores[1].parts == {}
    (group,) = start("turns", "fails").score([[conversation(*SAID, reward=0.5)]])
    assert group.scores[0].failure is Status.REWARD_ERROR


def failed(**more: Any) -> Trajectory:
    return conversation(status=Status.ENVIRONMENT_ERROR, error="the server is gone", **more)


def test_a_failed_environment_is_a_failure_of_its_own(start: Start) -> None:
    manager = start("turns", max_error_share=0.5)
    groups = manager.score([[failed(), conversation(*SAID)]])
    assert [score.failure for score in groups[0].scores] == [Status.ENVIRONMENT_ERROR, None]
    manager.check_share(groups)
    groups = manager.score([[failed(), failed(), conversation(*SAID)]])
    with pytest.raises(
        RewardShareExceeded, match=r"2 of 3 trajectories were lost to environments.*\nthe server is gone"
    ):
        manager.check_share(groups)
    assert reward_metrics(groups)["reward/errors"] == 0 and metrics(groups)["conversation/environment_errors"] == 2
    assert start().score([[failed()]])[0].scores[0].failure is Status.ENVIRONMENT_ERROR


def test_what_was_called_off_has_no_reward_whatever_its_environment_gave(start: Start) -> None:
    called_off = conversation(*SAID, reward=1.0, status=Status.ABORTED)
    for manager in (start(), start("turns")):
        (group,) = manager.score([[called_off, conversation(*SAID, reward=0.5)]])
        assert group.scores[0].value is None and group.scores[0].failure is Status.NOT_SCORED


def line(token: int, *turns: Turn, mask: list[bool]) -> Branch:
    ids = np.full(len(mask), token, np.int32)
    return Branch(ids[:1], ids, np.array(mask), np.zeros(len(mask), np.float32), ids, turns)


def test_a_reward_model_reads_the_branch_that_the_trajectory_ended_in() -> None:
    of_a_transcript = conversation(*SAID, branches=(line(7, mask=[True]), line(8, mask=[True])))
    of_a_session = conversation(*SAID, branches=(line(9, mask=[True]),), ends_in=0)
    batch = ends_of_answers([row_of_ids(of_a_transcript), row_of_ids(of_a_session)], np.arange(2))
    assert batch.prompt_ids.tolist() == [8] and np.diff(batch.response_offsets).tolist() == [2, 1]


def test_a_step_without_any_reward_is_a_mistake_and_one_with_some_is_none(start: Start) -> None:
    manager = start()
    silent, one = conversation(*SAID), conversation(*SAID, reward=0.0)
    with pytest.raises(RewardShareExceeded, match=r"none of 2 trajectories has a reward: .* data_source 'sums'"):
        manager.check_share(manager.score([[silent, silent]]))
    manager.check_share(manager.score([[silent, silent], [silent, one]]))


def test_a_reward_model_alone_adds_to_the_environment() -> None:
    (group,) = without_functions([[failed(), conversation(*SAID, reward=0.5), conversation(*SAID)]])
    assert [score.value for score in group.scores] == [None, 0.5, 0.0]
    assert group.scores[0].failure is Status.ENVIRONMENT_ERROR


def test_numbers_are_means_over_trajectories() -> None:
    policy, told = Turn("policy", 1), Turn("tool", 2)
    two = line(7, policy, told, policy, mask=[True, False, False, True])
    again_and_another = line(8, policy, told, policy, mask=[False, False, False, True])
    spoken = [
        conversation(*SAID, numbers={"calls": 3.0}, branches=(two, again_and_another)),
        conversation(*SAID[2:], branches=(two,)),
        failed(numbers={"retries": 1.0}),
    ]
    group = Group([*spoken, conversation(*SAID, numbers={"calls": 1.0})], [Score(0.0)] * 4)
    assert metrics([group]) == {
        "conversation/calls": 1.0,
        "conversation/retries": 0.25,
        "conversation/turns": 1.25,
        "conversation/environment_errors": 1.0,
    }
    assert metrics([Group([conversation(), conversation()], [Score(0.0)] * 2)]) == {}
