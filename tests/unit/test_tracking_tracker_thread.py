"""Trackers behind the steps: late, failing, hanging and turned on afterwards, each comes once; no run waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tandem.config.trackers import TrackerConfig
from tandem.config.tracking import TrackingConfig
from tandem.tracking.base import Sample, TrackedRun, Tracker
from tandem.tracking.described import described, masked
from tandem.tracking.jsonl import JsonlRecorder
from tandem.tracking.tracker_thread import TrackerThread
from tandem.tracking.trackers import chosen_trackers
from tandem.tracking.trajectories import trajectories_path, validation_path
from tests.unit.tracked_program import write_samples


class Kept(Tracker):
    """Keeps what it gets; `fails(step)` says what a step's call raises, if anything."""

    def __init__(self, taken: list[Any], fails: Callable[[int], BaseException | None] = lambda step: None) -> None:
        self.taken, self.fails = taken, fails

    def log_samples(self, step: int, table: str, samples: list[Sample]) -> None:
        self.taken.append((step, table, samples))
        if error := self.fails(-step):
            raise error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if error := self.fails(step):
            raise error
        self.taken.append((step, metrics))

    def close(self, ended: str) -> None:
        self.taken.append(ended)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("trainer: {steps: 5}\n")
    (tmp_path / "environment.json").write_text("{}")
    return tmp_path


def track(
    run: Path,
    make: Callable[[TrackedRun], Tracker],
    steps: range,
    ended: str = "finished",
    first_step: int = 0,
    options: TrackerConfig | None = None,
) -> None:
    lines = JsonlRecorder(run / "metrics.jsonl")
    behind = TrackerThread("kept", make, options or TrackerConfig(), run, first_step)
    for step in steps:
        for recorder in (lines, behind):
            recorder.log(step, {"reward/mean": step / 10})
    behind.close(ended)


def logged(taken: list[Any]) -> list[int]:
    return [one[0] for one in taken if isinstance(one, tuple) and len(one) == 2]


def test_steps_come_in_order_and_the_end_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[Any] = []
    track(run, lambda told: Kept(taken), range(4), "stopped")
    assert taken == [*((step, {"reward/mean": step / 10}) for step in range(4)), "stopped"]
    assert capsys.readouterr().out == ""


def test_a_resumed_run_repeats_no_step_and_keeps_its_id(run: Path) -> None:
    taken: list[Any] = []
    runs: list[TrackedRun] = []

    def make(told: TrackedRun) -> Tracker:
        runs.append(told)
        return Kept(taken)

    track(run, make, range(5), "failed")
    track(run, make, range(3, 7), first_step=2)
    assert logged(taken) == [0, 1, 2, 3, 4, 5, 6]
    assert runs[0].id == runs[1].id and len(runs[0].id) == 16
    assert [told.last_step for told in runs] == [-1, 4] and runs[1].config == {"trainer": {"steps": 5}}


def test_a_tracker_that_is_turned_on_late_gets_every_step(run: Path) -> None:
    lines, taken = JsonlRecorder(run / "metrics.jsonl"), []
    for step in (0, 1, 2, 3, 2, 3):
        lines.log(step, {"reward/mean": step + len(taken)})
    track(run, lambda told: Kept(taken), range(3, 5), first_step=2)
    assert logged(taken) == [0, 1, 2, 3, 4]


def test_what_the_tracker_knows_of_itself_counts(run: Path) -> None:
    taken: list[Any] = []
    track(run, lambda told: Kept(taken), range(4), "failed")

    def make(told: TrackedRun) -> Tracker:
        assert told.last_step == 3
        tracker = Kept(taken)
        tracker.last_step = 1
        return tracker

    taken.clear()
    track(run, make, range(4, 6), first_step=3)
    assert logged(taken) == [2, 3, 4, 5]


def test_a_call_that_fails_is_told_once_and_made_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[Any] = []
    errors = {1: [OSError("no route"), OSError("still none")], 2: [SystemExit("a package that exits")]}
    track(run, lambda told: Kept(taken, lambda step: errors[step].pop() if errors.get(step) else None), range(4))
    printed = capsys.readouterr().out
    assert logged(taken) == [0] or logged(taken) == [0, 1, 2, 3], "it was closed while it waited, or was not"
    assert printed.count("OSError: still none") == 1 and "no route" not in printed
    track(run, lambda told: Kept(taken), range(4, 5), first_step=3)
    assert logged(taken) == [0, 1, 2, 3, 4]


def test_one_that_is_down_ends_with_the_run_and_catches_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(told: TrackedRun) -> Tracker:
        raise ConnectionError("nobody there")

    track(run, refuse, range(1, 4))
    printed = capsys.readouterr().out
    assert printed.count("nobody there") == 1 and "failed calls; no step is there; resuming the run" in printed
    taken: list[Any] = []
    track(run, lambda told: Kept(taken), range(0), first_step=3)
    assert logged(taken) == [1, 2, 3] and taken[-1] == "finished"


@pytest.mark.parametrize("ended", ["finished", "killed"])
def test_nobody_waits_for_one_that_hangs(run: Path, capsys: pytest.CaptureFixture[str], ended: str) -> None:
    asleep, woken = Event(), Event()

    def make(told: TrackedRun) -> Tracker:
        asleep.set()
        woken.wait()
        return Kept([])

    track(run, make, range(1, 4), ended, options=TrackerConfig(close_timeout_s=0.1))
    assert asleep.wait(10) and not woken.is_set()
    told = "no step is there" in capsys.readouterr().out
    assert told == (ended == "finished"), "a run that ends at once says nothing"
    woken.set()


def test_tables_come_with_the_steps_that_have_files(run: Path) -> None:
    for step in (2, 3, 4):
        write_samples(trajectories_path(run, step), step)
    write_samples(validation_path(run, 3), 3)
    lines, taken = JsonlRecorder(run / "metrics.jsonl"), []
    behind = TrackerThread("kept", lambda told: Kept(taken), TrackerConfig(samples_every=2, samples=2), run, 0)
    for step in range(1, 7):
        validated = {"val/a/acc/mean@1": 0.5} if step == 3 else {}
        for recorder in (lines, behind):
            recorder.log(step, {"reward/mean": 0.1, **validated})
    behind.close("finished")
    tables = [one for one in taken if isinstance(one, tuple) and len(one) == 3]
    assert [table[:2] for table in tables] == [(2, "samples"), (3, "validation_samples"), (4, "samples")]
    assert tables[0][2] == [Sample("1+1=", "2", 1.0, 0.5), Sample("1+2=", "3", 0.5, -0.5)]
    assert logged(taken) == [1, 2, 3, 4, 5, 6]


def test_a_table_that_fails_is_counted_and_not_tried_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        write_samples(trajectories_path(run, step), step)
    taken: list[Any] = []
    make = lambda told: Kept(taken, lambda step: ValueError("no tables here") if step < 0 else None)  # noqa: E731
    track(run, make, range(1, 3), options=TrackerConfig(samples_every=1))
    printed = capsys.readouterr().out
    assert printed.count("no tables here") == 1 and "2 tables of samples were not taken; every step is there" in printed
    assert logged(taken) == [1, 2]


def test_secrets_are_masked(run: Path) -> None:
    tree = {"api_key": "a", "env": {"HF_TOKEN": "b", "eos_token_id": 3}, "url": "https://ada:c@host/x", "n": [1, "d"]}
    shown = {"api_key": "***", "env": {"HF_TOKEN": "***", "eos_token_id": 3}, "url": "https://***@host/x"}
    assert masked(tree) == {**shown, "n": [1, "d"]}
    (run / "config.yaml").write_text("password: hunter2\nmodel: {path: x}\n")
    assert described(run) == ({"password": "***", "model": {"path": "x"}}, {})


def test_own_trackers_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import tandem\n\n\n"
        "class Mine(tandem.Tracker):\n"
        "    def __init__(self, options, run):\n        self.options = options\n\n"
        "    def log(self, step, metrics):\n        pass\n\n"
        "    def close(self, ended):\n        pass\n"
    )
    given = {"own": [f"{file}:Mine", {"tracker": f"{file}:Mine", "options": {"place": "there"}}]}
    first, second = chosen_trackers(TrackingConfig.model_validate_json(json.dumps(given)))
    assert [first.name, second.name] == ["own-Mine", "own-Mine-1"]
    assert second.make(TrackedRun(tmp_path, "a", -1, {}, {})).options == {"place": "there"}  # pyright: ignore
