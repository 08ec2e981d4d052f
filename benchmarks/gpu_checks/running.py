"""Runs checks one after another, each in a process of its own, which may fail, hang or be killed.

    child: check(bench) --line a record--> pipe --> parent: terminal and figures.jsonl
    parent waits for: a line, the child's end, or the check's limit, whichever comes first

A child is a fork of a parent that has imported everything and has never asked CUDA anything, so that a check starts in
milliseconds and with a CUDA context of its own. It leads a session, which is killed as a whole when the check is over.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gpu_checks.figures import (
    BAD,
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
    Record,
    Skipped,
    from_line,
    to_line,
)

_LAST_LINES = 8
"""Of a check that did not end well, so many lines of its output are shown."""
_LEAST_SHARE = 0.1
"""A check is not begun where less than this share of its limit is left."""


@dataclass(frozen=True)
class Check:
    name: str
    limit_s: float
    function: Callable[[Bench], None]

    @property
    def purpose(self) -> str:
        """What it measures: the first line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class Output:
    """The folder of a run: `figures.jsonl`, and `output.log`, which has what the checks printed."""

    folder: Path

    @property
    def figures(self) -> Path:
        return self.folder / "figures.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "output.log"

    def keep(self, record: Record) -> None:
        """On the terminal, and on disk: synced, since a GPU's fault may take the machine along."""
        with self.figures.open("a", encoding="utf-8") as file:
            file.write(to_line(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if isinstance(record, Machine):
            print(f"{record.card}; torch {record.torch}; {record.versions}; commit {record.commit}", flush=True)
        elif isinstance(record, Figure):
            beside = f"   [published: {record.published_text}]" if record.published is not None else ""
            print(f"   {record.case:<28} {record.name:<34} {record.text}{beside}", flush=True)
        elif isinstance(record, End):
            reason = f": {record.reason}" if record.reason else ""
            print(f"== {record.check}: {record.state}, {record.seconds:.1f} s{reason}", flush=True)


def run_all(checks: Sequence[Check], output: Output, work: Path, small: bool, budget_s: float) -> list[End]:
    """Run the checks in their order, for `budget_s` seconds in all. How each ended has been kept when this returns, and
    also where an interrupt ends it."""
    start, ends = time.monotonic(), []
    for check in checks:
        left = budget_s - (time.monotonic() - start)
        if left < _LEAST_SHARE * check.limit_s:
            ends.append(End(check.name, NOT_BEGUN, 0.0, f"of {budget_s:g} s too few were left"))
        else:
            print(f"-- {check.name}: {check.purpose}", flush=True)
            ends.append(run(check, output, work, small, min(check.limit_s, left)))
        output.keep(ends[-1])
    return ends


def run(check: Check, output: Output, work: Path, small: bool, limit_s: float) -> End:
    """Run one check; how it ended. Its figures are kept as they come."""
    output.log.touch()
    before, start = output.log.stat().st_size, time.monotonic()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (pid := os.fork()):
        os.close(reader)
        _child(check, work, small, writer, output.log)
    os.close(writer)
    told: list[End] = []
    try:
        for record in _records(pid, reader, start + limit_s):
            if isinstance(record, End):
                told.append(record)
            else:
                output.keep(record)
        seconds = time.monotonic() - start
    finally:
        os.close(reader)
        status = _end(pid)
    end = _ended(check.name, status, told, seconds, limit_s)
    if end.state in BAD:
        lines = output.log.read_bytes()[before:].decode(errors="replace").splitlines()
        print("   its last lines:", *(line[:240] for line in lines[-_LAST_LINES:]), sep="\n      ", flush=True)
    return end


def _records(pid: int, reader: int, deadline: float) -> Iterator[Record]:
    """What the child sends, until it has ended or the deadline has passed."""
    os.set_blocking(reader, False)
    process, rest, ended = os.pidfd_open(pid), b"", False
    try:
        while not ended and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([reader, process], [], [], left)
            ended = process in ready
            *lines, rest = (rest + _available(reader)).split(b"\n")
            yield from (from_line(line.decode()) for line in lines)
    finally:
        os.close(process)


def _available(reader: int) -> bytes:
    """All that can be read without waiting."""
    parts: list[bytes] = []
    with suppress(BlockingIOError):
        while part := os.read(reader, 1 << 16):
            parts.append(part)
    return b"".join(parts)


def _end(pid: int) -> int | None:
    """Kill the child's session; the child's exit status, negative for a signal, or None where it had not ended."""
    done, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if done:
        return os.waitstatus_to_exitcode(status)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not have had the time to lead its session
    os.waitpid(pid, 0)
    return None


def _ended(name: str, status: int | None, told: list[End], seconds: float, limit_s: float) -> End:
    if status is None:
        return End(name, TIMED_OUT, seconds, f"not over after {limit_s:.0f} s")
    if status < 0:
        return End(name, KILLED, seconds, f"by {signal.Signals(-status).name}")
    state, reason = (told[-1].state, told[-1].reason) if told else (FAILED, f"ended with exit status {status}")
    return End(name, state, seconds, reason)


def _child(check: Check, work: Path, small: bool, writer: int, log: Path) -> NoReturn:
    """Run the check, and never return into the parent's code."""
    os.setsid()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))

    def send(record: Record) -> None:
        line = (to_line(record) + "\n").encode()
        while line:
            line = line[os.write(writer, line) :]

    status = 1
    try:
        check.function(Bench(check.name, small, work, send))
        send(End(check.name, OK, 0.0))
        status = 0
    except Skipped as reason:
        send(End(check.name, SKIPPED, 0.0, str(reason)))
        status = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other checks go on
        traceback.print_exc()
        send(End(check.name, FAILED, 0.0, _in_one_line(error)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
