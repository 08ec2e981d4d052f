"""Metrics on disk, on the console and in TensorBoard."""

import io
import json
import math
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions

import numpy as np
import pytest
from rich.console import Console

from tandem import activity
from tandem.tracking.base import Sample, TrackedRun
from tandem.tracking.console import ConsoleRecorder
from tandem.tracking.jsonl import JsonlRecorder, read_metrics
from tandem.tracking.run_environment import write_environment
from tandem.tracking.trackers.tensorboard import TensorBoardConfig, TensorBoardTracker
from tests.conftest import ROOT


def test_each_step_is_one_strict_json_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlRecorder(path)
    assert not path.exists(), "it says that a run has begun"
    tracker.log(1, {"reward/mean": 0.1, "critic/vf_explained_var": math.nan, "actor/kl": np.float32(0.5)})
    first = path.read_text()
    assert first == '{"step": 1, "reward/mean": 0.1, "critic/vf_explained_var": null, "actor/kl": 0.5}\n'
    tracker.log(2, {"reward/mean": 1 / 3})
    tracker.close("finished")
    records = read_metrics(path)
    assert math.isnan(records[0]["critic/vf_explained_var"])
    assert records[1] == {"step": 2, "reward/mean": 1 / 3}


def test_a_resumed_run_appends_after_a_torn_line_and_its_records_win(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n{"step": 3, "rew')
    tracker = JsonlRecorder(path)
    tracker.log(2, {"reward/mean": 0.25})
    tracker.log(3, {"reward/mean": 0.3})
    tracker.close("finished")
    assert path.read_text().splitlines()[2:] == [
        '{"step": 3, "rew',
        '{"step": 2, "reward/mean": 0.25}',
        '{"step": 3, "reward/mean": 0.3}',
    ]
    assert [(record["step"], record["reward/mean"]) for record in read_metrics(path)] == [(1, 0.1), (2, 0.25), (3, 0.3)]
    JsonlRecorder(path).close("finished")
    assert path.read_text().count("\n") == 5, "opening a whole file adds nothing"


def test_the_console_prints_one_line_a_step(capsys):
    tracker = ConsoleRecorder(total_steps=4, first_step=1)
    tracker.log(2, {"reward/mean": 0.25, "perf/tokens_per_s": 10.0})
    tracker.log(3, {"reward/mean": 0.5, "val/a/acc/mean@1": 1.0})
    tracker.close("finished")
    assert capsys.readouterr().out == "step 2/4  reward/mean 0.25\nstep 3/4  reward/mean 0.5  val/a/acc/mean@1 1\n"


def test_a_terminal_gets_a_bar_and_keeps_the_validations():
    screen = Console(file=io.StringIO(), force_terminal=True, width=160)
    tracker = ConsoleRecorder(total_steps=4, console=screen)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5, "val/a/acc/mean@1": 1.0})
    tracker.close("finished")
    printed = screen.file.getvalue()
    assert "2/4" in printed and "reward/mean=0.5" in printed and "step 2/4  val/a/acc/mean@1 1" in printed


def test_a_terminal_shows_what_is_done_and_the_last_answer_on_eighty_columns():
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    tracker = ConsoleRecorder(total_steps=100, console=screen)
    tracker.log(7, {"reward/mean": 0.25, "perf/tokens_per_s": 1234.5})
    activity.show(activity.Shown("Sort: " + "9 " * 40 + "3 1=", "[1, 3]\n\x1b[2J" + "and so on " * 20, 0.5))
    activity.begin("generation", 64, "prompts")
    activity.count(37)
    tracker.log(8, {"reward/mean": 0.5})
    tracker.close("finished")
    activity.show(None)
    printed = screen.file.getvalue()
    assert "generation 37/64 prompts, 0 s" in printed and "tokens/s=1,234" in printed
    assert "reward 0.5: …" in printed and "9 3 1= -> [1, 3]" in printed, "the end of a prompt, an answer's beginning"
    frames = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", printed)
    assert max(map(len, frames)) <= 80 and "and so" in printed and "\x1b[2J" not in printed


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_shows_the_step_and_whole_metrics(width):
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    tracker = ConsoleRecorder(total_steps=100, console=screen)
    shown = {"reward/mean": 0.25, "response_length/mean": 3.5, "actor/entropy": 1.5, "actor/grad_norm": 2.5}
    tracker.log(7, shown)
    tracker.close("finished")
    printed = screen.file.getvalue()
    assert "step   7/100" in printed and all(f"{name}={value}" in printed for name, value in shown.items())


def test_tensorboard_events_hold_every_metric_and_hide_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((0, 1, 2, 3), (2, 3)):
        tracker = TensorBoardTracker(TensorBoardConfig(), TrackedRun(tmp_path, "a", steps[0] - 1, {}, {}))
        for step in steps:
            tracker.log_samples(step, "samples", [Sample("1+1=", "2\n<b>", 1.0, None)])
            tracker.log(step, {"reward/mean": step + len(steps), "actor/lr": 1e-6})
        tracker.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["actor/lr", "reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 4), (1, 5), (2, 4), (3, 5)]
    texts = events.Tensors("samples/text_summary")
    assert [event.step for event in texts][-2:] == [2, 3]
    shown = b"reward 1.0, advantage None\n\n    1+1=\n\n    2\n    <b>"
    assert texts[-1].tensor_proto.string_val[0] == shown, "no markup of a model's is drawn"


def test_tracking_and_checkpoints_import_no_torch():
    code = (
        "import sys, tandem.checkpoint, tandem.tracking.report, tandem.tracking.console, "
        "tandem.tracking.jsonl, tandem.tracking.run_environment, tandem.tracking.trackers.tensorboard;"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_of_all_times_have_a_name_and_a_version(tmp_path, monkeypatch):
    """Of a wheel, whose description is long, of a directory that setuptools wrote, and of a file that distutils did."""
    described = "Metadata-Version: 2.1\nName: {}\nVersion: 1.2\n\nName: of the description\n"
    for place in ("new-1.2.dist-info/METADATA", "older-1.2.egg-info/PKG-INFO", "oldest-1.2.egg-info"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(described.format(place.partition("-")[0]))
    found = partial(distributions, path=[str(tmp_path)])
    monkeypatch.setattr("tandem.tracking.run_environment.distributions", found)
    write_environment(tmp_path, seed=0)
    packages = json.loads((tmp_path / "environment.json").read_text())["packages"]
    assert packages == {"new": "1.2", "older": "1.2", "oldest": "1.2"}


def test_environment_names_versions_hardware_and_seed(tmp_path):
    write_environment(tmp_path, seed=7)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["seed"] == 7
    assert environment["packages"]["pyarrow"] == __import__("pyarrow").__version__
    assert environment["cores"] >= 1
    assert environment["memory_gib"] > 0.1
    assert environment["gpus"] is None or "," in environment["gpus"]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert (environment["git_revision"] or "").removesuffix("-dirty") == head.stdout.strip()
