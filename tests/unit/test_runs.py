"""`tandem runs`: the state of each run, its step, and the best it has reached, within a terminal's columns."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoint.progress import Progress
from tandem.cli import main
from tandem.jobs.result import Run
from tandem.jobs.runs import find_runs, table


def make_run(path: Path, values: list[float | None], metric: str = "reward/mean", trainer: str = "{steps: 3}") -> Path:
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / "config.yaml").write_text(f"trainer: {trainer}\n")
    lines = [json.dumps({"step": step, metric: value}) for step, value in enumerate(values, 1)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def save(run: Path, step: int, total: int) -> None:
    state = run / "checkpoints" / f"step_{step:06d}" / "state"
    state.mkdir(parents=True)
    Progress(step, total, "fsdp", {}).write(state.parent)
    (run / "checkpoints/latest").write_text(state.parent.name)


def test_every_state_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("finished", "stopped", "failed"):
        (make_run(tmp_path / name, [0.1, 0.3, 0.2]) / "ended").write_text(f"{name}\n")
    save(make_run(tmp_path / "deep/killed", [0.5], "sft/loss", "{epochs: 1}"), 1, 7)
    save(make_run(tmp_path / "old", [0.5, 0.25], "val/a/kl", "{steps: 2, best_metric: val/a/kl}"), 2, 2)
    make_run(tmp_path / ("long" * 20), [0.25], "val/" + "source" * 9 + "/acc/mean@4")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run/config.yaml").write_text("a: 1\n")
    make_run(tmp_path / "running", [])
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(tmp_path / "running/.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert main(["runs", str(tmp_path)]) == 0
    holder.communicate()
    printed = capsys.readouterr().out
    heading, *rows = [line.split() for line in printed.splitlines()]
    assert heading == ["run", "state", "step", "best"]
    assert [row for row in rows if not row[0].startswith("long")] == [
        ["deep/killed", "killed", "1/7", "sft/loss", "0.5", "last"],
        ["failed", "failed", "3/3", "reward/mean", "0.3", "max"],
        ["finished", "finished", "3/3", "reward/mean", "0.3", "max"],
        ["old", "finished", "2/2", "val/a/kl", "0.25", "min"],
        ["running", "running", "0/3"],
        ["stopped", "stopped", "3/3", "reward/mean", "0.3", "max"],
    ]
    assert len(rows) == 7 and "long" * 20 in printed and "source" * 9 in printed, "whoever reads a pipe wants names"
    for columns in (80, 100):
        shown = table(find_runs(tmp_path), tmp_path, columns).splitlines()
        assert columns - 1 <= max(map(len, shown)) <= columns and sum("…" in line for line in shown) == 1


def test_steps_that_a_later_start_began_before_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.2, 0.9, 0.8])
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "reward/mean": value}) + "\n" for step, value in ((2, 0.3), (3, 0.4)))
    assert main(["runs", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "killed", "3/3", "reward/mean", "0.4", "max"]


def test_of_equal_values_the_first_is_the_best(tmp_path: Path) -> None:
    for name, metric, values in (
        ("most", "reward/mean", [None, 0.2, 0.5, 0.5, 0.1]),
        ("least", "val/loss", [0.9, None, 0.3, 0.3, 0.7]),
    ):
        best = Run(make_run(tmp_path / name, values, metric)).best
        assert best is not None and (best.metric, best.value, best.step) == (metric, values[2], 3)


def test_looking_leaves_no_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", [0.1])
    assert main(["runs", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "killed", "1/3", "reward/mean", "0.1", "max"]
    with (tmp_path / "run/.lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_directory_that_is_none_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "trainer", "best", "shown"),
    [
        ([{"sft/loss": 0.1, "val/loss": 0.9}, {"sft/loss": 0.3, "val/loss": 0.4}, {"sft/loss": 0.2, "val/loss": 0.5}],
         "{steps: 3}", ("val/loss", 0.4, 2), "val/loss 0.4 min"),
        ([{"dpo/loss": 0.1, "val/loss": 0.9, "val/accuracy": 0.8}, {"val/loss": 0.4, "val/accuracy": 0.7}],
         "{steps: 2}", ("val/accuracy", 0.8, 1), "val/accuracy 0.8 max"),
        ([{"sft/loss": 0.1}, {"sft/loss": 0.3}], "{steps: 2}", None, "sft/loss 0.3 last"),
        ([{"reward/mean": 0.9, "val/a/reward/mean@1": 0.2}, {"reward/mean": 0.8, "val/a/reward/mean@1": 0.3}],
         "{steps: 2}", ("val/a/reward/mean@1", 0.3, 2), "val/a/reward/mean@1 0.3 max"),
        ([{"val/loss": 0.9, "val/margin": 2.0}, {"val/loss": 0.4, "val/margin": 1.0}],
         "{steps: 2, best_metric: val/margin, best_mode: min}", ("val/margin", 1.0, 2), "val/margin 1 min"),
    ],
)  # fmt: skip
def test_the_best_is_of_a_metric_that_says_something(
    records: list[dict[str, float]], trainer: str, best: object, shown: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", [], trainer=trainer)
    lines = [json.dumps({"step": step, **record}) for step, record in enumerate(records, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert Run(run).best == best
    assert find_runs(tmp_path)[0].best == shown
