"""`scripts/gpu`: a check that fails, hangs or is killed costs itself alone; the budget; the table; checks on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_checks.figures import (
    FAILED,
    KILLED,
    NOT_BEGUN,
    OK,
    SKIPPED,
    TIMED_OUT,
    Bench,
    End,
    Figure,
    Machine,
    Skipped,
    read,
    to_line,
)
from gpu_checks.published import PUBLISHED
from gpu_checks.running import Check, Output, run_all
from gpu_checks.tables import markdown, of_kind, summary

from tests.conftest import ROOT


def measures(bench: Bench) -> None:
    """Says a number."""
    bench.report("speed", 1234.5, "GB/s")


def fails(bench: Bench) -> None:
    measures(bench)
    print("about to divide")
    bench.report("never", 1 / 0)


def hangs(bench: Bench) -> None:
    measures(bench)
    child = subprocess.Popen(["sleep", "1000"])
    bench.report("child", child.pid)
    time.sleep(1000)


def is_killed(bench: Bench) -> None:
    measures(bench)
    os.kill(os.getpid(), signal.SIGKILL)


def exits(bench: Bench) -> None:
    measures(bench)
    os._exit(3)


def lacks_something(bench: Bench) -> None:
    raise Skipped("needs two GPUs")


def checked(tmp_path: Path, *checks: Check, budget_s: float = 1000.0) -> Output:
    output = Output(tmp_path)
    run_all(checks, output, tmp_path, small=True, budget_s=budget_s)
    return output


def test_what_a_check_has_measured_outlasts_it_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [fails, is_killed, exits, lacks_something, measures]
    checks = [Check("hangs", 2.0, hangs), *(Check(function.__name__, 60.0, function) for function in bad)]
    records = read(checked(tmp_path, *checks).figures)
    ends = {end.check: (end.state, end.reason) for end in of_kind(records, End)}
    assert ends == {
        "hangs": (TIMED_OUT, "not over after 2 s"),
        "fails": (FAILED, "ZeroDivisionError: division by zero"),
        "is_killed": (KILLED, "by SIGKILL"),
        "exits": (FAILED, "ended with exit status 3"),
        "lacks_something": (SKIPPED, "needs two GPUs"),
        "measures": (OK, ""),
    }
    speeds = [figure.check for figure in of_kind(records, Figure) if figure.name == "speed"]
    assert speeds == ["hangs", "fails", "is_killed", "exits", "measures"]
    (child,) = (figure.value for figure in of_kind(records, Figure) if figure.name == "child")
    assert not is_running(int(child)), "what a check has started ends with it"
    shown = capsys.readouterr().out
    assert "about to divide" in shown and "1,234 GB/s" in shown and "== hangs: TIMED OUT" in shown


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which nobody may collect in a container."""
    deadline = time.monotonic() + 60
    while (state := _state(pid)) not in ("Z", "gone") and time.monotonic() < deadline:
        time.sleep(0.05)
    return state not in ("Z", "gone")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_a_check_is_not_begun_where_too_little_of_its_time_is_left(tmp_path: Path) -> None:
    output = checked(tmp_path, Check("short", 20.0, measures), Check("long", 1000.0, measures), budget_s=60.0)
    ends = of_kind(read(output.figures), End)
    assert [(end.check, end.state) for end in ends] == [("short", OK), ("long", NOT_BEGUN)]
    assert ends[1].reason == "of 60 s too few were left"


RECORDS = [
    Machine("2026-11-28", "abc1234", "NVIDIA H200", "2.11.0+cu130", "driver 580, Python 3.12.3"),
    Figure("decoding", "tokens", 550.4, "tokens/s", "1 row", 418.0, "vLLM, H100"),
    Figure("ceilings", "copy", 4163.2, "GB/s"),
    Figure("environment", "trl", "not | installed"),
    End("decoding", OK, 21.04),
    End("two_ranks", SKIPPED, 0.1, "needs two GPUs"),
]
TABLE = """\
NVIDIA H200, 2026-11-28; torch 2.11.0+cu130; driver 580, Python 3.12.3; commit abc1234.

| check | of | figure | measured | published |
| --- | --- | --- | --- | --- |
| `decoding` | 1 row | tokens | 550.4 tokens/s | 418 tokens/s (vLLM, H100) |
| `ceilings` | | copy | 4,163 GB/s | |
| `environment` | | trl | not \\| installed | |

- `two_ranks`: skipped, needs two GPUs"""


def test_the_table_says_where_and_what_and_what_was_published() -> None:
    assert "\n".join(markdown(RECORDS)) == TABLE
    assert list(summary(RECORDS)) == [
        "decoding         ok           21.0 s    1 figures",
        "two_ranks        skipped       0.1 s    0 figures  needs two GPUs",
    ]


def test_a_line_that_was_cut_off_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text("".join(f"{to_line(record)}\n" for record in RECORDS) + '{"kind": "figure", "che')
    assert read(path) == RECORDS


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run([ROOT / "scripts/gpu", *arguments], env=environment, capture_output=True, text=True)


def test_checks_run_on_a_cpu(tmp_path: Path) -> None:
    ended = gpu("--small", "--only", "environment", "choosing", "--out", str(tmp_path), "--commit", "abc1234")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = read(tmp_path / "figures.jsonl")
    assert [(end.check, end.state) for end in of_kind(records, End)] == [("environment", OK), ("choosing", OK)]
    chosen = [figure for figure in of_kind(records, Figure) if figure.check == "choosing"]
    assert [figure.case for figure in chosen] == ["plain", "top_k 50", "top_p 0.95"]
    assert all(isinstance(figure.value, float) and figure.value > 0 for figure in chosen)
    assert "commit abc1234." in (tmp_path / "table.md").read_text()
    again = gpu("--table", str(tmp_path / "figures.jsonl"))
    assert again.stdout == (tmp_path / "table.md").read_text()


def test_unknown_checks_are_refused(tmp_path: Path) -> None:
    ended = gpu("--small", "--only", "decode", "--out", str(tmp_path))
    assert ended.returncode == 2 and "no check decode; there are environment, ceilings" in ended.stderr


def test_what_is_published_belongs_to_a_check() -> None:
    from gpu_checks.listing import CHECKS

    assert {check for check, _, _ in PUBLISHED} <= {check.name for check in CHECKS}
    assert all(check.purpose.endswith(".") for check in CHECKS)
