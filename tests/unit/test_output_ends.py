"""What ends around a run: its output, its terminal, the room on its disk, its directory. It goes on, or says in one
message which file cannot be written, and `ended` says why."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.checkpoint.store import CheckpointStore
from tandem.cli import main
from tandem.errors import TandemError
from tandem.jobs.callbacks import Callback, RunControl
from tandem.jobs.runs import state_of
from tandem.tracking.jsonl import JsonlRecorder, read_metrics
from tests.programs import PYTHON, TANDEM, Program

QUICK = ("data.cache.workers=1", "trainer.eval_every=0", "generation.max_response_tokens=4")


def begin(config: Path, *options: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE) -> Program:
    return Program([TANDEM, "train", str(config), *QUICK, *options], stdout=stdout, stderr=stderr, text=True)


def steps_of(run: Path) -> int:
    return len(read_metrics(run / "metrics.jsonl"))


def wait_for_steps(program: Program, run: Path, more: int) -> None:
    wanted = steps_of(run) + more
    while steps_of(run) < wanted:
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The end to write to of a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    yield writes
    os.close(writes)


@pytest.fixture
def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("output", "reason"), [("closed_pipe", "Broken pipe"), ("full_disk", "No space left on device")]
)
def test_a_run_goes_on_without_its_output(
    output: str, reason: str, grpo_config: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = begin(grpo_config, stdout=request.getfixturevalue(output))
    _, told = program.communicate(timeout=120)
    assert program.returncode == 0, told
    assert told.count(f"standard output cannot be written ({reason}); the run goes on without it\n") == 1
    assert "Traceback" not in told and "Exception ignored" not in told
    assert (tmp_path / "run/ended").read_text() == "finished\n" and steps_of(tmp_path / "run") == 3


def test_a_run_goes_on_without_any_output(grpo_config: Path, tmp_path: Path, full_disk: int) -> None:
    assert begin(grpo_config, stdout=full_disk, stderr=full_disk).wait(timeout=120) == 0
    assert state_of(tmp_path / "run") == "finished"


@pytest.mark.parametrize(
    ("output", "told"),
    [("closed_pipe", ""), ("full_disk", "tandem: standard output cannot be written: No space left on device\n")],
)
def test_other_commands_end_with_their_output(
    output: str, told: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = Program(
        [TANDEM, "runs", str(tmp_path)], stdout=request.getfixturevalue(output), stderr=subprocess.PIPE, text=True
    )
    assert program.communicate(timeout=120)[1] == told and program.returncode == 1


def test_the_end_of_the_terminal_saves_as_sigterm_does(grpo_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = begin(grpo_config, "trainer.steps=100000")
    wait_for_steps(program, run, 1)
    program.send_signal(signal.SIGHUP)
    printed, told = program.communicate(timeout=120)
    assert program.returncode == 129, told
    assert "SIGHUP: stopping after this step" in printed
    assert (run / "checkpoints/latest").read_text() == f"step_{steps_of(run):06d}\n"
    assert (run / "ended").read_text() == "stopped\nSIGHUP\n" and state_of(run) == "stopped"


def test_under_nohup_the_end_of_the_terminal_changes_nothing(grpo_config: Path, tmp_path: Path) -> None:
    ignoring = (
        "import signal, sys, tandem.cli; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.exit(tandem.cli.main())"
    )
    program = Program(
        [PYTHON, "-c", ignoring, "train", str(grpo_config), *QUICK, "trainer.steps=100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(program, tmp_path / "run", 1)
    program.send_signal(signal.SIGHUP)
    wait_for_steps(program, tmp_path / "run", 2)
    program.send_signal(signal.SIGTERM)
    assert program.communicate(timeout=120)[1].count("Traceback") == 0 and program.returncode == 143
    assert (tmp_path / "run/ended").read_text() == "stopped\nSIGTERM\n"


class Break(Callback):
    """After the first step something happens to the run's directory."""

    def __init__(self, how: Callable[[Path], object]) -> None:
        self._how = how

    def on_step(self, run: RunControl, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            self._how(run.run_dir)


def without_room(name: str) -> Callable[[Path], object]:
    """A file of the next step is on a disk that is full."""

    def link(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("/dev/full")

    return link


def limit_files(run: Path) -> None:
    """No file may be larger than metrics.jsonl is."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((run / "metrics.jsonl").stat().st_size, hard))


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL, LARGE, GONE = "No space left on device", "File too large", "No such file or directory"


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("how", "every", "file", "reason"),
    [
        (without_room("metrics.jsonl"), 0, "metrics.jsonl", FULL),
        (without_room("trajectories/.step_000002.parquet.tmp"), 1, "trajectories/step_000002.parquet", FULL),
        (limit_files, 0, "metrics.jsonl", LARGE),
        (limit_files, 1, "trajectories/step_000002.parquet", LARGE),
        (shutil.rmtree, 0, "metrics.jsonl", GONE),
        (shutil.rmtree, 1, "trajectories/step_000002.parquet", GONE),
    ],
)
def test_what_cannot_be_written_is_told_with_its_path(
    how: Callable[[Path], object], every: int, file: str, reason: str, grpo_config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = tandem.load_config(
        tandem.TrainConfig, grpo_config, [*QUICK, f"trainer.trajectories_every={every}", "trainer.save_every=0"]
    )
    with pytest.raises(TandemError, match=f"^{run / file}: cannot be written \\(.*{reason}.*\\); .*") as raised:
        tandem.train(config, [Break(how)])
    assert "\n" not in str(raised.value)
    assert not [path for path in run.rglob("*.tmp") if not path.is_symlink()]
    if how is shutil.rmtree:
        assert not run.exists(), "what somebody has deleted is not made anew"
    else:
        assert (run / "ended").read_text() == f"failed\n{raised.value}\n"


def test_a_checkpoint_in_a_directory_that_is_gone(grpo_config: Path, tmp_path: Path) -> None:
    config = tandem.load_config(tandem.TrainConfig, grpo_config, [*QUICK, "trainer.trajectories_every=0"])
    store = CheckpointStore(config.trainer.run_dir, 1)
    told = pytest.raises(TandemError, match=f"{config.trainer.run_dir}/checkpoints/step_000001: cannot be written")
    with told, store.write(1):
        pass


def test_a_report_that_cannot_be_written_is_no_failure_of_the_run(grpo_config: Path, tmp_path: Path) -> None:
    config = tandem.load_config(tandem.TrainConfig, grpo_config, [*QUICK, "trainer.steps=2"])
    with pytest.raises(TandemError, match=r"report.html: the report cannot be written .*; the run itself is whole"):
        tandem.train(config, [Break(without_room(".report.html.tmp"))])
    assert (tmp_path / "run/ended").read_text() == "finished\n"


def test_what_ended_a_run_is_kept(grpo_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("def score(completion):\n    raise ValueError('no such\\nthing')\n")
    assert main(["train", str(grpo_config), *QUICK, f"reward.functions=[{tmp_path}/bad.py:score]"]) == 1
    state, reason = (tmp_path / "run/ended").read_text().splitlines()
    assert state == "failed" and reason and reason in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0 and "failed" in capsys.readouterr().out


def test_a_long_record_is_not_read_to_be_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # endless to a reader
    with pytest.raises(TandemError, match=f"{tmp_path}/metrics.jsonl: cannot be written .No space left on device"):
        JsonlRecorder(tmp_path / "metrics.jsonl").log(1, {})
