""".ci/run runs every part, tells what became of each, and does not let pass what it has promised to run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT


def ci(directory: Path, **parts: str) -> subprocess.CompletedProcess[str]:
    """Run CI with parts that print some lines and exit with the number that comes first."""
    for name, script in parts.items():
        status, _, printed = script.partition(" ")
        (directory / name).write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {status}\n")
        (directory / name).chmod(0o755)
    command = [str(ROOT / ".ci/run"), *(str(directory / name) for name in parts)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_part_runs_and_is_in_the_table(tmp_path: Path) -> None:
    skip = "SKIPPED [2] tests/unit/test_x.py:7: needs a CUDA device"
    broken = "FAILED tests/unit/test_x.py::test_y - AssertionError"
    ended = ci(
        tmp_path,
        one="0 fine",
        two=f"1 {broken}\n==== 3 failed, 4 passed in 2s ====",
        three=f"0 {skip}\n== 5 passed in 1s ==\na library's complaint as it ends",
    )
    assert ended.returncode == 1
    _, skipped, failed, summary = ended.stdout.rsplit("=== ", 3)
    assert "2 tests/unit/test_x.py: needs a CUDA device" in skipped
    assert failed.splitlines()[1:] == ["tests/unit/test_x.py::test_y - AssertionError"]
    lines = [line.split() for line in summary.splitlines()[1:4]]
    assert [(line[0], line[4:]) for line in lines] == [
        ("pass", ["fine"]),
        ("FAIL", ["3", "failed,", "4", "passed", "in", "2s"]),
        ("pass", ["5", "passed", "in", "1s"]),
    ]
    assert summary.splitlines()[-1].endswith(" s in all")


def test_sound_parts_are_success(tmp_path: Path) -> None:
    assert ci(tmp_path, one="0 fine").returncode == 0


def test_what_is_promised_must_not_be_skipped(tmp_path: Path) -> None:
    skip = "SKIPPED [9] tests/unit/test_reward_cure.py:28: no sandbox on this machine: bwrap is not installed"
    ended = ci(tmp_path, one=f"0 {skip}\n1 passed in 1s")
    assert ended.returncode == 1 and "these must run here" in ended.stdout


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_nightly_run_that_is_stopped_leaves_no_process(sent: signal.Signals, tmp_path: Path) -> None:
    for folder in ("scripts", "docs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/nightly", tmp_path / "scripts/nightly")
    python = tmp_path / ".venv/bin/python"
    python.write_text(
        "#!/bin/sh\nsleep 1000 &\necho started >&2\necho $$ > running.new\nmv running.new running\nwait\n"
    )
    python.chmod(0o755)
    author = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "c"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    nightly = subprocess.Popen([tmp_path / "scripts/nightly", "unit"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "running").exists():
        assert time.monotonic() < deadline and nightly.poll() is None
        time.sleep(0.05)
    nightly.send_signal(sent)
    _, told = nightly.communicate(timeout=120)
    assert nightly.returncode == 130 and told == "stopped; the part in hand begins anew the next time\n"
    group = (tmp_path / "running").read_text().strip()
    left = subprocess.run(["ps", "-o", "stat=", "-g", group], capture_output=True, text=True, check=False).stdout
    assert all(state.startswith("Z") for state in left.split()), left
    assert not (tmp_path / "docs/nightly.md").exists()


def test_files_of_tests_have_different_names() -> None:
    """pytest takes two of one name for the same module, and collects neither."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_a_lane_that_is_killed_is_a_failure(tmp_path: Path) -> None:
    """All parts of .ci/run, replaced by programs that succeed, but that one kills the shell that runs its lane."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    text = (ROOT / ".ci/run").read_text()
    (tmp_path / ".ci/run").write_text(text)
    parts = set(re.findall(r"scripts/[a-z-]+", text.partition("in_turn scripts/sandbox")[2]))
    assert len(parts) >= 9
    for killed in (False, True):
        for part in {"scripts/sandbox", *parts}:
            body = "kill -9 $PPID" if killed and part == "scripts/wheel" else "echo fine"
            (tmp_path / part).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / part).chmod(0o755)
        ended = subprocess.run(["sh", str(tmp_path / ".ci/run")], capture_output=True, text=True, check=False)
        assert (ended.returncode != 0) == killed, ended.stdout + ended.stderr
        assert ("scripts/site" in ended.stdout.rpartition("=== summary")[2]) != killed
