"""Samplers that learn, and rows of classes of one's own: numbers worked by hand, resumes, and mistakes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_tokenizer import char_tokenizer

from tandem.config.data import DataConfig
from tandem.data.learning_sampler import LearningSampler, Outcome
from tandem.data.mixture import make_sampler
from tandem.data.own_rows import OwnDataset
from tandem.data.samplers.solve_rate import SolveRateSampler
from tandem.errors import UserError

TOKENIZER = char_tokenizer()
OWN = '''
class Sums:
    """2 * `pairs` rows, of which none is stored."""

    def __init__(self, files, pairs):
        self.files, self.pairs = files, pairs

    def __len__(self):
        return 2 * self.pairs

    def __getitem__(self, index):
        return {"prompt": f"{index}+1=", "answer": index + 1}


class Later(Sums):
    def __getitem__(self, index):
        return super().__getitem__(index) if index < 3 else {"answer": 0}


class Arrays(Sums):
    def __getitem__(self, index):
        import numpy
        return {"prompt": "1+1=", "tools": numpy.array([1, 2])}


class Longer(Sums):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return [Sums.__getitem__(self, place) for place in range(3)][index]


class Listed(Sums):
    def __getitem__(self, index):
        return [index]


class Unfit(Sums):
    def __init__(self, files):
        pass


class Unsized:
    def __getitem__(self, index):
        return {}


class Backwards:
    """The last row first; after an update with a reward of 0 that row once more."""

    def __init__(self, rows, rows_per_step, seed, step=1):
        self.rows, self.at, self.step, self.again = rows, 0, step, []

    def draw(self):
        if self.again:
            return self.again.pop(0)
        self.at += self.step
        return self.rows - 1 - (self.at - self.step) % self.rows

    def update(self, outcomes):
        self.again += [one.row for one in outcomes if 0.0 in one.rewards]

    def state(self):
        return {"at": self.at, "again": list(self.again)}

    def load_state(self, state):
        self.at, self.again = state["at"], list(state["again"])


class Outside(Backwards):
    def draw(self):
        return self.rows


class Array(Backwards):
    def draw(self):
        import numpy
        return numpy.array([3])


class Unwritable(Backwards):
    def state(self):
        return {1: self.at}


class Failing(Backwards):
    def draw(self):
        raise KeyError("no row is left")


class Forgetful:
    def draw(self):
        return 0

    def update(self, outcomes):
        pass
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def dataset(own: str, name: str = "Sums", pairs: int = 4, **section: Any) -> OwnDataset:
    keys = {"dataset": f"{own}:{name}", "dataset_arguments": {"pairs": pairs}, "prompts_per_step": 3}
    return OwnDataset([], TOKENIZER, DataConfig.model_validate({**keys, **section}))


def sampler(own: str, name: str = "Backwards", **arguments: Any) -> LearningSampler:
    section = {"type": "own", "sampler": f"{own}:{name}", "arguments": arguments}
    config = DataConfig.model_validate({"sampler": section, "prompts_per_step": 3})
    made = make_sampler(config, dataset(own), seed=7)
    assert isinstance(made, LearningSampler)
    return made


def by_rate(rows: int = 10, per_step: int = 4, seed: int = 3) -> LearningSampler:
    return LearningSampler(SolveRateSampler(rows, per_step, seed, 0.5), "here", {"type": "x"}, rows, per_step, seed)


def outcome(row: int, solved: int, of: int = 8) -> Outcome:
    return Outcome(row, (1.0,) * solved + (0.0,) * (of - solved), ())


def step(of: LearningSampler) -> list[int]:
    """Rows of a step; each is then solved as often as its number says, of nine."""
    rows = next(of)
    of.update([outcome(row, min(row, 9), 9) for row in rows])
    return rows


def test_weights_are_the_expected_variance_of_what_is_known() -> None:
    rates = SolveRateSampler(4, 2, 0, discount=0.5)
    rates.update([outcome(0, 4), outcome(1, 0), outcome(2, 8)])
    half, never = 5 * 5 / (10 * 11), 1 * 9 / (10 * 11)
    assert rates.weights().tolist() == pytest.approx([half, never, never, 1 / 6])
    rates.update([outcome(1, 2, of=2)])  # 0 + 2 solved, 8 / 2 + 0 not
    assert rates.weights()[1] == pytest.approx(3 * 5 / (8 * 9))
    rates.update([Outcome(3, (5.0, -3.0), ()), Outcome(0, (0.0,), (1.0,)), Outcome(2, (), ())])  # accuracies come first
    assert rates.weights()[3] == pytest.approx(2 * 2 / (4 * 5))
    assert rates.weights()[0] == pytest.approx(4 * 3 / (7 * 8))
    assert rates.weights()[2] == pytest.approx(never)


def test_metrics_are_of_the_rows_that_were_seen(own: str) -> None:
    rates = SolveRateSampler(8, 4, 0, discount=0.5)
    assert rates.metrics() == {"data/solve_rate/seen_share": 0}
    rates.update([outcome(0, 2), outcome(1, 0), outcome(2, 8), outcome(3, 8), Outcome(4, (), ())])
    rates.update([outcome(0, 0), outcome(3, 7)])  # 1 of 12 solved, and 11 of 12
    assert rates.metrics() == pytest.approx(
        {
            "data/solve_rate/seen_share": 4 / 8, "data/solve_rate/mean": (1 / 12 + 0 + 1 + 11 / 12) / 4,
            "data/solve_rate/never_share": 1 / 4, "data/solve_rate/always_share": 1 / 4,
        }
    )  # fmt: skip
    config = DataConfig.model_validate({"sampler": {"type": "solve_rate"}, "prompts_per_step": 3})
    made = make_sampler(config, dataset(own), seed=7)
    assert isinstance(made, LearningSampler) and step(made)
    assert made.metrics()["data/epoch"] == made.metrics()["data/solve_rate/seen_share"] == 3 / 8
    assert sampler(own).metrics() == {"data/epoch": 0}


def test_rows_are_drawn_in_proportion_and_no_step_has_one_twice() -> None:
    rates = SolveRateSampler(3, 1, 5, discount=1.0)
    rates.update([outcome(0, 40, of=80), outcome(1, 0, of=8)])
    weights = rates.weights() / rates.weights().sum()
    drawn = Counter(rates.draw() for _ in range(4000))
    for row, weight in enumerate(weights.tolist()):
        assert abs(drawn[row] - 4000 * weight) < 4 * (4000 * weight * (1 - weight)) ** 0.5
    four = by_rate()
    assert all(len(set(step(four))) == 4 for _ in range(50))
    assert sorted(next(by_rate(rows=3, per_step=3))) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["solve_rate", "own"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_one_goes_on_as_the_one_that_was_not_stopped(kind: str, stop: int, own: str) -> None:
    def make() -> LearningSampler:
        return by_rate() if kind == "solve_rate" else sampler(own)

    whole, first = make(), make()
    expected = []
    for number in range(8):
        expected.append(step(whole))
        if number + 1 == stop:
            whole.row(whole.cursor + 6)  # drawn ahead of training
    assert [step(first) for _ in range(stop)] == expected[:stop]
    ahead = [first.row(first.cursor + place) for place in range(7)]
    again = make()
    again.load_state(json.loads(json.dumps(first.state())))
    assert [again.row(again.cursor + place) for place in reversed(range(7))] == ahead[::-1]
    assert [step(again) for _ in range(stop, 8)] == expected[stop:]


def test_dropped_groups_count(own: str) -> None:
    one = sampler(own)
    assert [one.row(draw) for draw in range(5)] == [7, 6, 5, 4, 3]
    one.cursor = 5
    one.update([Outcome(row, (reward, reward), ()) for row, reward in ((7, 1.0), (6, 0.0), (5, 1.0), (4, 0.0))])
    assert [one.row(draw) for draw in range(5, 9)] == [6, 4, 2, 1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Forgetful", r"own.py:Forgetful lacks state, load_state; a sampler has draw, update, state, load_state"),
        ("Nothing", "names no class"),
        ("Outside", "gave 8, which is no row of 0 to 7"),
        ("Array", r"gave array\(\[3\]\), which is no row"),
        ("Unwritable", r"JSON changes what state\(\) gives"),
        ("Failing", "(?s)draw failed:.*no row is left"),
    ],
)
def test_mistakes_in_samplers_are_told(name: str, told: str, own: str) -> None:
    with pytest.raises(UserError, match=told):
        one = sampler(own, name)
        next(one)
        one.state()


def test_a_sampler_with_other_arguments_is_not_resumed(own: str) -> None:
    state = sampler(own).state()
    with pytest.raises(UserError, match=r"cannot resume: data sampler was .* put it back, or start anew"):
        sampler(own, step=2).load_state(state)
    with pytest.raises(UserError, match=r"cannot be made as Class\(rows, rows_per_step, seed, \*\*arguments\)"):
        sampler(own, stride=2)


def test_rows_of_a_class_are_read_when_they_are_drawn(own: str) -> None:
    made = dataset(own, pairs=500_000)
    assert len(made) == 1_000_000 and made.descriptions[0].endswith(
        "own.py:Sums: 1,000,000 rows, read when they are drawn"
    )
    prompt = made[999_999]
    assert (prompt.index, prompt.text, prompt.ground_truth) == (999_999, "999999+1=", 1_000_000)
    assert [(one.index, count) for one, count in made.kinds] == [(0, 1)]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Unsized", r"own.py:Unsized lacks __len__; a data set has __len__, __getitem__"),
        ("Listed", "row 0: it is a list, not a dict of columns"),
        ("Later", "row 3: column `prompt` is missing"),
        ("Unfit", "(?s)failed:.*TypeError"),
        ("Arrays", "row 0: The truth value of an array"),
        ("Longer", r"(?s)row 3 of 9 failed:.*IndexError"),
    ],
)
def test_mistakes_in_classes_of_rows_are_told(name: str, told: str, own: str) -> None:
    with pytest.raises(UserError, match=told):
        dataset(own, name)


def test_one_set_is_drawn_from(own: str) -> None:
    mixture = {"a": {"files": ["a.jsonl"]}}
    for section in ({"dataset": f"{own}:Sums"}, {"sampler": {"type": "solve_rate"}}):
        with pytest.raises(ValueError, match="mixture"):
            DataConfig.model_validate({"mixture": mixture, **section})
