"""Which engine gets which ask, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tandem.controller.clock import RolloutTimes
from tandem.controller.engines import Engines
from tandem.controller.worker_groups import Future
from tandem.errors import WorkerLost
from tandem.types import Group, Prompt, Score, Status, Trajectory
from tandem.workers.rollout import Advance, Ask, RolloutRequest

SAMPLES = 4


class Slices:
    """Engines whose slices end when the test says so."""

    def __init__(self, *room: int) -> None:
        self._room = list(room)
        self.patience_s: list[float] = []
        """Of each slice, engine by engine as they come."""
        self.given: list[list[int]] = [[] for _ in room]
        """The asks that each engine has had, by number."""
        self._ends: dict[int, Callable[[dict[int, Advance]], None]] = {}

    def room(self) -> Future[list[int]]:
        return Future(lambda: self._room, notify=lambda _: None)

    def advance(self, asks: Mapping[int, Mapping[int, Ask]], patience_s: float) -> Any:
        [(engine, new)] = asks.items()
        self.given[engine] += new
        self.patience_s.append(patience_s)
        slices = self

        class Under:
            def then(self, callback: Callable[[dict[int, Advance]], None]) -> None:
                slices._ends[engine] = callback

        return Under()

    def end(self, engine: int, room: int, *done: int, tokens: int = 0) -> None:
        """A slice ends with so much room and these groups, of so many tokens."""
        self._ends.pop(engine)({engine: Advance([(number, [], None) for number in done], room, tokens)})


def give(
    slices: Slices, count: int, fixed: bool = False, now: Callable[[], float] = lambda: 0.0, timeout_s: float = 9.0
) -> Engines:
    engines = Engines(slices, SAMPLES, count, fixed, lambda *_: None, now, lambda: False, timeout_s)  # type: ignore[arg-type]
    prompt = Prompt(0, np.zeros(1, np.int32), "", "", None)
    engines.add(dict.fromkeys(range(count), Ask(RolloutRequest(prompt, (1,) * SAMPLES), False)))
    engines.give()
    return engines


def test_a_slot_that_is_free_is_given_the_next_group_though_not_all_of_it_fits() -> None:
    slices = Slices(8)
    give(slices, count=4)
    assert slices.given == [[0, 1]]
    slices.end(0, room=0)
    assert slices.given == [[0, 1]], "the engine is full"
    slices.end(0, room=1)
    assert slices.given == [[0, 1, 2]], "and three of its samples wait in the engine"
    slices.end(0, -2, 0)
    assert slices.given == [[0, 1, 2]]
    slices.end(0, 2, 1)
    assert slices.given == [[0, 1, 2, 3]]


def test_an_engine_with_room_takes_the_oldest_that_waits() -> None:
    slices = Slices(4, 4)
    give(slices, count=6)
    assert slices.given == [[0], [1]]
    slices.end(1, 4, 1)
    assert slices.given == [[0], [1, 2]]
    slices.end(1, 4, 2)
    slices.end(1, 4, 3)
    slices.end(0, 4, 0)
    assert slices.given == [[0, 5], [1, 2, 3, 4]]


def test_what_fits_is_spread_evenly_and_once_speeds_are_known_by_them() -> None:
    slices, clock = Slices(400, 400), [0.0]
    engines = give(slices, count=40, now=lambda: clock[0])
    assert [len(given) for given in slices.given] == [20, 20], "no engine is known to be faster"
    clock[0] = 1.0
    slices.end(0, 400, *slices.given[0], tokens=3000)
    clock[0] = 3.0
    slices.end(1, 400, *slices.given[1], tokens=3000)
    prompt = Prompt(0, np.zeros(1, np.int32), "", "", None)
    engines.add(dict.fromkeys(range(40, 80), Ask(RolloutRequest(prompt, (1,) * SAMPLES), False)))
    engines.give()
    fast, slow = (len(given) - 20 for given in slices.given)
    assert fast + slow == 40 and fast in range(26, 31), "three times as fast, as far as these samples tell"


def test_an_idle_engine_leaves_the_last_one_to_a_faster_one_that_is_full() -> None:
    slices, clock = Slices(4, 4), [0.0]
    give(slices, count=30, now=lambda: clock[0])
    for _ in range(4):  # engine 0 makes six answers while engine 1 makes one
        for _ in range(6):
            clock[0] += 1.0
            slices.end(0, 4, slices.given[0][-1], tokens=100)
        slices.end(1, 4, slices.given[1][-1], tokens=100)
    assert [len(given) for given in slices.given] == [25, 4]
    slices.end(0, 4, slices.given[0][-1], tokens=100)
    assert [len(given) for given in slices.given] == [26, 4], "the last one"


def test_where_nothing_may_depend_on_time_each_engine_gets_its_share_at_once() -> None:
    slices = Slices(4, 4)
    give(slices, count=6, fixed=True)
    assert slices.given == [[0, 1, 2], [3, 4, 5]]


def test_an_engine_that_answers_nothing_for_too_long_is_lost() -> None:
    """Though its slices end. What is left out: waiting between slices, and what is beyond a minute of one slice."""
    slices, clock = Slices(8), [0.0]
    engines = give(slices, count=2, now=lambda: clock[0], timeout_s=100.0)

    def end(seconds: float, *done: int) -> None:
        clock[0] += seconds
        slices.end(0, 0, *done)

    end(55)
    end(40, 0)
    end(55)
    engines.paused = True
    end(40)
    clock[0] += 1000
    engines.paused = False
    engines.give()
    end(1)
    with pytest.raises(WorkerLost, match=r"engine 0 has run for 156 s and ended none of the 1 prompts .* 1 to 1"):
        end(3600)


def test_slices_are_short_while_training_waits_for_scores_alone() -> None:
    slices, hurried = Slices(8), [False]
    engines = Engines(slices, SAMPLES, 2, False, lambda *_: None, lambda: 0.0, lambda: hurried[0])  # type: ignore[arg-type]
    prompt = Prompt(0, np.zeros(1, np.int32), "", "", None)
    engines.add(dict.fromkeys(range(2), Ask(RolloutRequest(prompt, (1,) * SAMPLES), False)))
    engines.give()
    hurried[0] = True
    slices.end(0, 0, 0)
    usual_s, short_s = slices.patience_s
    assert short_s <= usual_s / 10


def test_the_wanted_staleness_is_that_of_the_longest_answer_with_its_scoring() -> None:
    """7 s of answer and 2 s of scoring over 4 s of training."""
    clock = [0.0]
    times = RolloutTimes(lambda: clock[0])
    ids = np.zeros(1, np.int32)
    prompt = Prompt(0, ids, "", "", None)
    answer = Trajectory(prompt, 0, ids, ids > -1, ids * 0.0, ids, "", Status.COMPLETED, generation_s=7.0)
    with times.taking():
        clock[0] += 9.0
    times.took([Group([answer], [Score(1.0, seconds=2.0)])])
    clock[0] += 4.0
    times.published()
    assert times.metrics()["perf/wanted_staleness"] == 3.0
