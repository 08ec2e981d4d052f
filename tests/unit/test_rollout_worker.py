"""Answers that are asked for and taken in slices: `RolloutWorker.advance`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tandem import activity
from tandem.config.generation import NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.errors import EngineError, UserError
from tandem.generation.fake import FakeEngine
from tandem.types import Prompt, Status, Trajectory
from tandem.workers import rollout
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import Advance, Ask, RolloutRequest, RolloutSpec, RolloutWorker, seeded_requests

STOP = 1
"""The end of sequence of sort4's tokenizer."""
COUNTED = range(4, 40)
"""After each of these tokens comes the next one, and STOP after the last: the prompt says how long the answer is."""
DRAWN = range(40, 50)
"""After one of these comes another one, as the seed says, and never an end."""
MAX_RUNNING, MAX_TOKENS = 256, 40


class ChainRollout(RolloutWorker):
    """An engine whose answers are known."""

    def _native(self, model: ModelConfig, config: Any, tokenizer: Any, actor: Any) -> FakeEngine:
        logits = torch.full((50, 50), -torch.inf)
        for token in COUNTED:
            logits[token, token + 1 if token + 1 in COUNTED else STOP] = 0.0
        logits[DRAWN.start :, DRAWN.start :] = torch.arange(10.0)
        return FakeEngine(logits, tokenizer=tokenizer)


def make_worker(sort4: Path, calls: int | None = None, sleep: Literal["idle", "always"] = "idle") -> ChainRollout:
    tokenizer = AutoTokenizer.from_pretrained(sort4 / "model")
    config = NativeGenerationConfig(max_response_tokens=MAX_TOKENS, sleep=sleep)
    spec = RolloutSpec(ModelConfig(path=sort4 / "model"), config, tokenizer)
    made = ChainRollout(WorkerContext("rollout", calls_fd=calls), spec)
    made.publish(0)
    return made


@pytest.fixture
def worker(sort4: Path) -> Iterator[ChainRollout]:
    with closing(make_worker(sort4)) as made:
        yield made


def ask(*token_ids: int, seeds: tuple[int, ...] = (1, 2), with_greedy: bool = False) -> Ask:
    prompt = Prompt(token_ids[0], np.array(token_ids, np.int32), "", "", None)
    return Ask(RolloutRequest(prompt, seeds), with_greedy)


def take_all(worker: RolloutWorker, asks: Mapping[int, Ask], patience_s: float = 10.0) -> list[Advance]:
    """Slices until everything is there."""
    slices, left = [worker.advance(asks, patience_s)], len(asks)
    while (left := left - len(slices[-1].done)) > 0:
        slices.append(worker.advance({}, patience_s))
    return slices


def numbers(slices: list[Advance]) -> list[int]:
    return [number for advance in slices for number, _, _ in advance.done]


def responses(siblings: list[Trajectory]) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in siblings]


def test_a_slice_ends_with_a_complete_group_and_the_rest_goes_on_in_the_next(
    worker: ChainRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_COLLECTING_SHARE", 0.0)
    first = worker.advance({7: ask(COUNTED[0]), 8: ask(COUNTED[-1]), 9: ask(COUNTED[18])}, 10.0)
    assert numbers([first]) == [8]
    assert first.room == MAX_RUNNING - 4, "two samples each of the other two"
    second = worker.advance({4: ask(COUNTED[-1])}, 10.0)
    assert numbers([second]) == [4]
    rest = [worker.advance({}, 10.0), worker.advance({}, 10.0)]
    assert numbers(rest) == [9, 7]
    assert rest[-1].room == worker.room() == MAX_RUNNING
    ((_, siblings, greedy),) = rest[0].done
    assert responses(siblings) == [[*COUNTED[19:], STOP]] * 2 and greedy is None
    assert [trajectory.sample for trajectory in siblings] == [0, 1]
    assert {trajectory.status for trajectory in siblings} == {Status.COMPLETED}


def test_groups_that_end_early_in_a_slice_are_answered_together(worker: ChainRollout) -> None:
    asks = {7: ask(COUNTED[0]), 8: ask(COUNTED[-1]), 9: ask(COUNTED[18])}
    assert numbers([worker.advance(asks, 1000.0)]) == [7, 8, 9], "all within a fifth of the patience"


def test_slices_give_what_one_call_gives(worker: ChainRollout) -> None:
    asks = {number: ask(DRAWN[number], seeds=(number, 5, 6), with_greedy=number == 2) for number in range(4)}
    slices = take_all(worker, asks, patience_s=0.0)
    assert len(slices) > 5, "each is a few steps"
    whole = worker.generate([one.request for one in asks.values()])
    greedy = worker.generate([asks[2].request._replace(seeds=(2,))], greedy=True)
    for number, siblings, own_greedy in [entry for advance in slices for entry in advance.done]:
        assert responses(siblings) == responses(whole[number])
        np.testing.assert_array_equal(siblings[0].rollout_logprobs, whole[number][0].rollout_logprobs)
        assert (own_greedy and responses([own_greedy])) == (responses(greedy[0]) if number == 2 else None)


def test_a_slice_ends_when_another_call_waits_and_nothing_is_lost(sort4: Path) -> None:
    calls, controller = os.pipe()
    with closing(make_worker(sort4, calls)) as worker:
        os.write(controller, b"a call")
        asks = {7: ask(COUNTED[0]), 8: ask(COUNTED[0], seeds=(3,))}
        assert worker.advance(asks, 1000.0).done == [], "the answers take 36 steps"
        assert worker.advance({}, 1000.0).done == []
        os.read(calls, 100)
        assert sorted(numbers([worker.advance({}, 1000.0) for _ in asks])) == [7, 8]
    os.close(calls)
    os.close(controller)


def test_without_patience_or_anything_to_do_it_returns_at_once(worker: ChainRollout) -> None:
    assert worker.advance({}, 10.0) == Advance([], MAX_RUNNING, 0)
    assert worker.advance({0: ask(DRAWN[0])}, 0.0) == Advance([], MAX_RUNNING - 2, 0)


def test_room_is_negative_where_samples_wait(worker: ChainRollout) -> None:
    asks = {number: ask(DRAWN[0], seeds=tuple(range(100)), with_greedy=True) for number in range(3)}
    assert worker.advance(asks, 0.0).room == worker.room() == MAX_RUNNING - 303


def test_new_weights_between_two_slices_make_the_later_tokens(worker: ChainRollout) -> None:
    worker.advance({0: ask(DRAWN[0])}, 0.0)
    worker.publish(1)
    ((_, siblings, _),) = worker.advance({}, 10.0).done
    for trajectory in siblings:
        assert {*trajectory.versions} == {0, 1} and (np.diff(trajectory.versions) >= 0).all()


def test_validation_answers_are_counted_for_who_watches(worker: ChainRollout) -> None:
    activity.begin("validation", 3, "prompts")
    worker.generate_for_eval([ask(DRAWN[1], seeds=(1,)).request] * 3)
    assert activity.current()[0].done == 3


def test_validation_between_two_slices_loses_nothing(worker: ChainRollout) -> None:
    worker.advance({0: ask(COUNTED[0]), 1: ask(DRAWN[0])}, 0.0)
    (siblings,) = worker.generate_for_eval([ask(DRAWN[1], seeds=(1,)).request])
    assert len(siblings[0].response_ids) == MAX_TOKENS
    assert sorted(numbers([worker.advance({}, 0.0), worker.advance({}, 10.0)])) == [0, 1]


def test_asks_stand_still_while_the_engine_sleeps_and_go_on_after_it(sort4: Path) -> None:
    with closing(make_worker(sort4, sleep="always")) as worker:
        _check_asks_across_sleeps(worker)


def test_answers_under_way_keep_an_engine_awake_that_sleeps_when_it_is_idle(worker: ChainRollout) -> None:
    worker.advance({0: ask(COUNTED[0])}, 0.0)
    worker.sleep()
    assert worker.generate([]) == [], "it is awake"
    worker.wake()
    assert numbers([worker.advance({}, 10.0)]) == [0]
    worker.sleep()
    with pytest.raises(EngineError, match="wake it after sleep"):
        worker.generate([])


def _check_asks_across_sleeps(worker: ChainRollout) -> None:
    asks = {0: ask(DRAWN[0]), 1: ask(COUNTED[0], with_greedy=True), 2: ask(COUNTED[1])}
    whole = worker.generate([one.request for one in asks.values()])
    for version in (1, 2, 3):
        worker.advance({version - 1: asks[version - 1]}, 0.0)
        worker.sleep()
        worker.sleep()
        assert worker.advance({}, 0.01).done == []
        with pytest.raises(EngineError, match="wake it after sleep"):
            worker.generate([])
        worker.publish(version)
        worker.wake()
    for number, siblings, _ in [entry for _ in asks for entry in worker.advance({}, 10.0).done]:
        assert responses(siblings) == responses(whole[number])
        for trajectory in siblings:
            assert trajectory.status is (Status.TRUNCATED if number == 0 else Status.COMPLETED)
            assert (np.diff(trajectory.versions) >= 0).all() and trajectory.versions[-1] == 3
    assert worker.room() == MAX_RUNNING


def test_what_an_answer_raises_is_raised(worker: ChainRollout) -> None:
    worker.advance({0: ask(DRAWN[0])}, 0.0)
    with pytest.raises(UserError, match="not in the model's vocabulary"):
        worker.advance({1: ask(99)}, 10.0)


def test_a_worker_closes_with_answers_under_way(worker: ChainRollout) -> None:
    worker.advance({0: ask(DRAWN[0])}, 0.0)


def test_weights_that_came_in_part_answer_nothing(worker: ChainRollout) -> None:
    def breaks_off() -> None:
        raise EngineError("a process at the other end is gone")

    whole, worker._weights = worker._weights, breaks_off
    with pytest.raises(EngineError, match="the other end is gone"):
        worker.publish(1)
    with pytest.raises(EngineError, match="only a part of the weights of version 1 has arrived"):
        worker.advance({0: ask(39)}, 1.0)
    with pytest.raises(EngineError, match="only a part of the weights of version 1 has arrived"):
        worker.generate([ask(39).request])
    worker._weights = whole
    worker.publish(2)
    assert [len(done) for _, done, _ in worker.advance({0: ask(39)}, 5.0).done] == [2]


def test_every_sample_of_every_place_and_step_has_a_seed_of_its_own() -> None:
    def seeds(step: int) -> list[int]:
        asked = seeded_requests([None, None, None], 2, 7, 0, step)  # type: ignore[list-item]
        return [seed for request in asked for seed in request.seeds]

    assert len({*seeds(1), *seeds(2)}) == 12
    assert seeds(1) == seeds(1)
