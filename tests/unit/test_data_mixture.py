"""Several sets of rows: exact shares, each row of a set before any repeats, and a cursor that resumes."""

import json
from collections import Counter
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path

import pytest
from data_tokenizer import char_tokenizer, write_lines

from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.mixture import whole_weights
from tandem.data.dataset import RLHFDataset
from tandem.data.mixture import make_sampler, sampler_of_epochs
from tandem.data.preference import RatedDataset
from tandem.data.sampler import MixtureSampler
from tandem.data.shares import order_of_shares
from tandem.errors import UserError

SIZES = {"a": 7, "b": 10, "c": 3}
"""Rows 0 to 6, 7 to 16 and 17 to 19."""


def sampler(rows_per_step: int = 4, seed: int = 5, weights: tuple[float, ...] = (5, 3, 2)) -> MixtureSampler:
    return MixtureSampler(SIZES, weights, rows_per_step, True, seed)


@pytest.mark.parametrize("weights", [(5, 3, 2), (1,), (1, 1), (7, 1), (1, 1, 1, 97), (13, 8, 5, 3, 2, 1, 1)])
def test_turns_keep_each_share_to_less_than_one(weights: tuple[int, ...]) -> None:
    made, period, n = order_of_shares(weights).tolist(), sum(weights), len(weights)
    assert Counter(made) == dict(enumerate(weights))
    bound = 1 - Fraction(1, 2 * n - 2) if n > 1 else 0
    for turn in range(period + 1):
        for place, weight in enumerate(weights):
            assert abs(made[:turn].count(place) - Fraction(weight * turn, period)) <= bound


def test_turns_of_five_three_and_two() -> None:
    # At each turn, of those whose share is at least 1/4 ahead of what they had, the one whose room of 3/4 ends first.
    assert order_of_shares([5, 3, 2]).tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]


def test_weights_become_the_smallest_whole_numbers() -> None:
    assert whole_weights([0.5, 0.3, 0.2]) == whole_weights([10.0, 6.0, 4.0]) == [5, 3, 2]
    assert whole_weights([1.0, 1.0]) == [1, 1] and whole_weights([0.1, 1e-3]) == [100, 1]


def test_any_ten_draws_hold_five_three_and_two() -> None:
    rows = list(chain.from_iterable(islice(sampler(), 50)))
    sets = [sampler().set_of(row) for row in rows]
    for first in range(len(sets) - 10):
        assert Counter(sets[first : first + 10]) == {"a": 5, "b": 3, "c": 2}


def test_each_row_of_a_set_comes_once_before_any_comes_again() -> None:
    rows = list(chain.from_iterable(islice(sampler(), 100)))
    for name, first, last in (("a", 0, 7), ("b", 7, 17), ("c", 17, 20)):
        drawn = [row for row in rows if first <= row < last]
        assert {sampler().set_of(row) for row in drawn} == {name}
        size = last - first
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[start : start + size]) == list(range(first, last))


def test_the_seed_decides_the_rows_and_not_whose_turn_it_is() -> None:
    first, again, other = (list(chain.from_iterable(islice(sampler(seed=seed), 20))) for seed in (1, 1, 2))
    assert first == again != other
    assert [sampler().set_of(row) for row in first] == [sampler().set_of(row) for row in other]


@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_a_resumed_mixture_goes_on_as_the_one_that_was_not_stopped(stop: int) -> None:
    whole, stopped, resumed = list(islice(sampler(), 30)), sampler(), sampler()
    assert list(islice(stopped, stop)) == whole[:stop]
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert list(islice(resumed, 30 - stop)) == whole[stop:]
    assert resumed.epochs["a"] == sum(row < 7 for row in chain.from_iterable(whole)) / 7


def test_a_run_does_not_go_on_with_other_weights() -> None:
    with pytest.raises(UserError, match=r"data mixture was .*'a', 7, 5.*'c', 3, 2.*'c', 3, 1"):
        sampler(weights=(5, 3, 1)).load_state(sampler().state())


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_steps_for_ends_with_the_set_that_is_farthest_behind(epochs: int) -> None:
    one = sampler(rows_per_step=1)
    steps = one.steps_for(epochs)
    drawn = list(islice(one, steps))
    used = Counter(chain.from_iterable(drawn))
    assert min(used.values()) == epochs and one.epoch >= epochs and len(used) == 20
    one.cursor -= 1
    assert one.epoch < epochs


def test_a_data_set_says_which_rows_are_of_which_set(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{n}.jsonl", [{"prompt": "ab"}] * n + [{"prompt": ""}]) for n in (2, 3, 4)]
    mixture = {"x": {"files": files[:2], "weight": 0.5}, "y": {"files": files[2:], "weight": 1}}
    config = DataConfig.model_validate({"mixture": mixture, "prompts_per_step": 3, "on_bad_row": "skip"})
    dataset = RLHFDataset(config.train_paths, char_tokenizer(), config)
    made = make_sampler(config, dataset, 0)
    assert [made.set_of(row) for row in range(len(dataset))] == ["x"] * 5 + ["y"] * 4
    assert [[made.set_of(row) for row in rows].count("y") for rows in islice(made, 20)] == [2] * 20


def test_a_set_without_usable_rows_is_named(tmp_path: Path) -> None:
    good, bad = write_lines(tmp_path / "good.jsonl", [{"prompt": "ab"}]), write_lines(tmp_path / "bad.jsonl", [{}])
    mixture = {"good": {"files": [good]}, "bad": {"files": [bad]}}
    config = DataConfig.model_validate({"mixture": mixture, "on_bad_row": "skip"})
    dataset = RLHFDataset(config.train_paths, char_tokenizer(), config)
    with pytest.raises(UserError, match="no usable row is left in bad; mend"):
        make_sampler(config, dataset, 0)


def test_a_row_that_makes_several_demonstrations_counts_as_so_many(tmp_path: Path) -> None:
    pair = {"prompt": "1=", "chosen": "1", "rejected": "2"}
    files = [write_lines(tmp_path / "pairs.jsonl", [pair] * 2)]
    files.append(write_lines(tmp_path / "rated.jsonl", [{"prompt": "1=", "completion": "1", "label": True}] * 2))
    mixture = {name: {"files": [file]} for name, file in zip(("pairs", "rated"), files, strict=True)}
    config = SftDataConfig.model_validate({"mixture": mixture})
    made = sampler_of_epochs(config, RatedDataset(config.train_paths, char_tokenizer(), config), 3, 0)
    assert [made.set_of(row) for row in range(6)] == ["pairs"] * 4 + ["rated"] * 2
    assert made.epochs == {"pairs": 0, "rated": 0} and made.steps_for(1) == 3


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ({"a": {"files": ["a.jsonl"], "weight": 0}}, "greater than 0"),
        ({"a": {"files": []}}, "at least 1 item"),
        ({"a b": {"files": ["a.jsonl"]}}, "match pattern"),
        ({"a": {"files": ["x"], "weight": 0.123457}, "b": {"files": ["y"], "weight": 1}}, "123457:1000000 as whole"),
    ],
)
def test_what_no_mixture_can_be(mixture: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate({"mixture": mixture})
    with pytest.raises(ValueError, match=said):
        SftDataConfig.model_validate({"mixture": mixture})


def test_files_are_given_once() -> None:
    with pytest.raises(ValueError, match="as train_files or as sets of mixture, not both"):
        DataConfig.model_validate({"train_files": ["a.jsonl"], "mixture": {"a": {"files": ["a.jsonl"]}}})
