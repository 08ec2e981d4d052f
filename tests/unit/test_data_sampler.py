"""The order of the data: whole epochs, straddling steps, a cursor that resumes."""

import json
from itertools import chain, islice

import numpy as np
import pytest

from tandem.data.sampler import Sampler
from tandem.errors import UserError


def draw(sampler: Sampler, steps: int) -> list[list[int]]:
    return list(islice(sampler, steps))


def test_without_shuffling_steps_straddle_the_epochs_and_drop_nothing() -> None:
    sampler = Sampler(length=5, rows_per_step=3, shuffle=False, seed=0)
    assert draw(sampler, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert sampler.epoch == pytest.approx(12 / 5)


@pytest.mark.parametrize(("length", "rows_per_step"), [(7, 3), (8, 8), (3, 7), (1, 4), (1000, 128)])
def test_every_epoch_uses_each_row_exactly_once(length: int, rows_per_step: int) -> None:
    sampler = Sampler(length, rows_per_step, shuffle=True, seed=11)
    rows = list(chain.from_iterable(draw(sampler, sampler.steps_for(4))))
    for epoch in range(4):
        assert sorted(rows[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_orders_differ_between_epochs_and_seeds_and_repeat_with_the_seed() -> None:
    first, second = draw(Sampler(100, 100, True, seed=1), 2)
    assert first != second and first != list(range(100))
    assert draw(Sampler(100, 100, True, seed=2), 1) != [first]
    assert draw(Sampler(100, 50, True, seed=1), 2) == [first[:50], first[50:]]


def test_the_order_is_the_same_on_every_machine() -> None:
    # Philox and SeedSequence are counted integer arithmetic: these numbers hold wherever and whenever this runs.
    assert draw(Sampler(10, 10, True, seed=0), 2) == [[0, 8, 9, 3, 7, 5, 1, 2, 6, 4], [3, 7, 4, 2, 9, 8, 1, 6, 5, 0]]


@pytest.mark.parametrize("length", [1, 2, 1023, 5000, 70_000])
def test_the_order_is_that_of_all_keys_however_few_are_sorted_at_a_time(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.data.sampler._ShuffledRows._WINDOW", 700)
    keys = np.random.Philox(np.random.SeedSequence([3, 0])).random_raw(length)
    expected = np.argsort(keys, kind="stable").tolist()
    sampler = Sampler(length, length, shuffle=True, seed=3)
    assert draw(sampler, 1) == [expected]
    assert sampler.row(length // 2) == expected[length // 2], "one of a window before"


def test_steps_for_rounds_up() -> None:
    assert [Sampler(10, 4, True, 0).steps_for(epochs) for epochs in (1, 2, 3)] == [3, 5, 8]
    assert Sampler(8, 4, True, 0).steps_for(1) == 2


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 7])
def test_a_resumed_sampler_goes_on_as_the_one_that_was_not_stopped(stop: int) -> None:
    whole = draw(Sampler(10, 4, True, seed=5), 12)
    stopped = Sampler(10, 4, True, seed=5)
    draw(stopped, stop)
    resumed = Sampler(10, 4, True, seed=5)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.epoch == stopped.epoch
    assert draw(resumed, 12 - stop) == whole[stop:]


def test_a_state_goes_back_as_well_as_on() -> None:
    sampler = Sampler(10, 4, True, seed=5)
    state, first = sampler.state(), draw(sampler, 6)
    sampler.load_state(state)
    assert draw(sampler, 6) == first


def test_rows_per_step_may_change_on_resume() -> None:
    sampler, rows = Sampler(10, 4, True, seed=5), list(chain.from_iterable(draw(Sampler(10, 1, True, seed=5), 30)))
    draw(sampler, 3)
    wider = Sampler(10, 6, True, seed=5)
    wider.load_state(sampler.state())
    assert draw(wider, 2) == [rows[12:18], rows[18:24]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Sampler(11, 4, True, 5), "rows was 10, is 11"),
        (Sampler(10, 4, True, 6), "seed was 5, is 6"),
        (Sampler(10, 4, False, 5), "shuffle was True, is False"),
    ],
)
def test_resuming_on_another_order_is_refused(changed: Sampler, message: str) -> None:
    with pytest.raises(UserError, match=f"cannot resume: data {message} now"):
        changed.load_state(Sampler(10, 4, True, 5).state())
