"""Which engine gets which ask, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tandem.controller.clock import RolloutTimes
from tandem.controller.engines import Engines
from tandem.controller.groups import Future
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

    def end(self, engine: int, room: int, *done: int) -> None:
        """A slice ends with so much room and these groups."""
        self._ends.pop(engine)({engine: Advance([(number, [], None) for number in done], room)})


def give(
    slices: Slices, count: int, at_once: bool = False, now: Callable[[], float] = lambda: 0.0, timeout_s: float = 9.0
) -> Engines:
    engines = Engines(slices, SAMPLES, count, at_once, lambda *_: None, now, lambda: False, timeout_s)  # type: ignore[arg-type]
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


def test_an_engine_with_room_takes_what_waits_for_a_full_one() -> None:
    slices = Slices(4, 4)
    give(slices, count=6)
    assert slices.given == [[0], [3]]
    slices.end(1, 4, 3)
    assert slices.given == [[0], [3, 4]]
    slices.end(1, 4, 4)
    slices.end(1, 4, 5)
    assert slices.given == [[0], [3, 4, 5, 1]], "its own share first"
    slices.end(0, 4, 0)
    assert slices.given == [[0, 2], [3, 4, 5, 1]]


def test_where_nothing_may_depend_on_time_each_engine_gets_its_share_at_once() -> None:
    slices = Slices(4, 4)
    give(slices, count=6, at_once=True)
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
