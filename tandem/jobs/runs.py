"""`tandem runs`: the runs below a directory, how each stands, and the best that it has reached."""

import fcntl
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem.checkpoint.progress import Progress
from tandem.config.stored_run import StoredTrainer, stored_run
from tandem.errors import UserError, for_terminal
from tandem.files import write_text
from tandem.jobs.best_checkpoint import lower_is_better
from tandem.stored import DamagedFile, read_pointer, read_text
from tandem.tracking.jsonl import each_record

ENDED = "ended"
"""The file in a run directory that says how its last process ended, in a line of `ENDS`, and in a second one why."""
ENDS = ("finished", "stopped", "failed")
_DAMAGED = "damaged"
_DEPTH = 3
_VALIDATED = (r"val/.+/acc/mean@\d+", r"val/.+/reward/mean@\d+", "val/accuracy", "val/loss")
"""What a run is judged by, the first one that it measures. Of training it is the reward alone: a loss is of one step's
rows, and its lowest value says which rows were easy."""
_BETWEEN = "  "
_LEAST = 28
"""Characters of a run's name, and of its metric, that are shown in any terminal."""
_AtStep = tuple[float, int]
_TRAINING_LOSSES = ("sft/loss", "dpo/loss", "reward_model/loss")


class FoundRun(NamedTuple):
    """A row of the table."""

    path: Path
    state: str
    """running, finished, stopped, failed; killed: its process is gone and has not said how it ended; damaged: a file of
    the run cannot be read, and `best` says which one, and why."""
    step: str
    best: str


def find_runs(directory: Path) -> list[FoundRun]:
    """The runs at or below `directory`, by their paths. Raises UserError where it is none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; name one that runs are in")
    return [_described(path) for path in _run_dirs(directory, _DEPTH)]


def table(runs: list[FoundRun], directory: Path, columns: int | None = None) -> str:
    """Plain text. `columns`: of the terminal; names and metrics that are too long for it lose their beginnings."""
    rows = [("run", "state", "step", "best")]
    for run in runs:
        below = run.path.relative_to(directory)
        rows.append((str(below) if below.parts else run.path.name, run.state, run.step, run.best))
    names, states, steps, bests = (max(map(len, column)) for column in zip(*rows, strict=True))
    if columns is not None:
        room = columns - states - steps - 3 * len(_BETWEEN)
        bests = min(bests, max(_LEAST, room - names))
        names = min(names, max(_LEAST, room - bests))
    return "\n".join(
        _BETWEEN.join(
            (f"{_cut(name, names):<{names}}", f"{state:<{states}}", f"{step:>{steps}}", _cut(best, bests))
        ).rstrip()
        for name, state, step, best in rows
    )


def _run_dirs(directory: Path, depth: int) -> Iterator[Path]:
    """Those that may not be looked into among them, for they may be runs."""
    try:
        if (directory / "config.yaml").exists() and (directory / ".lock").exists():
            yield directory
            return
        inside = sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        yield directory
        return
    if depth:
        for child in inside:
            yield from _run_dirs(child, depth - 1)


def _described(run: Path) -> FoundRun:
    """A run with a file that cannot be read hides no other."""
    try:
        return _read(run)
    except DamagedFile as error:
        reason = for_terminal(error.reason.partition("\n")[0])
        return FoundRun(run, _DAMAGED, "?", f"{os.path.relpath(error.path, run)}: {reason}")
    except OSError as error:  # of a directory that may not be looked into
        return FoundRun(run, _DAMAGED, "?", for_terminal(str(error)))


def _read(run: Path) -> FoundRun:
    """Raises DamagedFile."""
    trainer = stored_trainer(run)
    measured = MetricExtremes(each_record(run / "metrics.jsonl"))
    progress = _progress(run)
    total = progress.total_steps if progress else trainer.steps
    done = progress.step if progress else 0  # own dataflows write no metrics
    step = f"{measured.last.get('step', done)}/{total or '?'}"
    return FoundRun(run, state_of(run), step, _reached(measured, trainer))


def _reached(measured: "MetricExtremes", trainer: StoredTrainer) -> str:
    """The best value with its name and what makes it the best, or else the last training loss."""
    if best := best_of(measured, trainer):
        metric, value, _ = best
        return f"{for_terminal(metric)} {value:.4g} {_mode(metric, trainer)}"
    last = measured.last
    return next((f"{name} {last[name]:.4g} last" for name in _TRAINING_LOSSES if name in last), "")


def stored_trainer(run: Path) -> StoredTrainer:
    """The section `trainer` of the run's config.yaml. Raises DamagedFile."""
    return stored_run(run).trainer or StoredTrainer()


def _progress(run: Path) -> Progress | None:
    """Of the latest checkpoint; None before the first one. Raises DamagedFile."""
    latest = run / "checkpoints" / "latest"
    while latest.exists():
        checkpoint = read_pointer(latest)
        try:
            return Progress.read(checkpoint)
        except DamagedFile:
            if latest.exists() and read_pointer(latest) == checkpoint:  # else the run has replaced it meanwhile
                raise
    return None


def state_of(run: Path) -> str:
    """As `FoundRun.state`. Raises DamagedFile where the files that say so cannot be read."""
    if _is_locked(run / ".lock"):
        return "running"
    if (run / ENDED).exists():
        return read_end(run)
    progress = _progress(run)
    return "finished" if progress and progress.step >= progress.total_steps else "killed"


def write_end(run: Path, state: str, reason: str = "") -> None:
    """Say how the run ended, and why. Raises OSError."""
    write_text(run / ENDED, "".join(f"{line}\n" for line in (state, reason) if line))


def read_end(run: Path) -> str:
    """How the run's last process ended. Raises DamagedFile."""
    mend = f"write {', '.join(ENDS)} into it, or delete it"
    state = read_text(run / ENDED, mend).partition("\n")[0]
    if state not in ENDS:
        raise DamagedFile(run / ENDED, f"says {state[:_LEAST]!r}, not how the run ended", mend)
    return state


def _is_locked(lock: Path) -> bool:
    """By a process that runs the run, on another machine, too, where the file system has locks. Raises DamagedFile."""
    try:
        file = lock.open("rb")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DamagedFile(lock, f"cannot be read ({error.strerror})") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            return False
    return False


class MetricExtremes:
    """What is asked of the metrics of a run, which may have many steps: the last record, and extremes."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.last: dict[str, Any] = {}
        self.extremes: dict[str, tuple[_AtStep, _AtStep] | None] = {}
        """By metric, without the steps where it was NaN: the first of the smallest and of the largest values, each with
        its step; None where all are NaN."""
        for record in records:
            self.last = record
            for name, value in record.items():
                self._take(name, value, record["step"])

    def _take(self, name: str, value: float, step: int) -> None:
        known = self.extremes.setdefault(name, None)
        if math.isnan(value):
            return
        if known is None:
            self.extremes[name] = (value, step), (value, step)
        elif value < known[0][0]:
            self.extremes[name] = (value, step), known[1]
        elif value > known[1][0]:
            self.extremes[name] = known[0], (value, step)


def best_of(measured: MetricExtremes, trainer: StoredTrainer) -> tuple[str, float, int] | None:
    """Metric, value and step: of `trainer.best_metric`, or else of a validation's accuracy, reward or loss, or else of
    the reward."""
    extremes = measured.extremes
    validated = [name for pattern in _VALIDATED for name in sorted(extremes) if re.fullmatch(pattern, name)]
    wanted = [trainer.best_metric, *validated, "reward/mean"]
    metric = next((name for name in wanted if name in extremes), None)
    if metric is None or (found := extremes[metric]) is None:
        return None
    value, step = found[_mode(metric, trainer) == "max"]
    return metric, value, step


def _mode(metric: str, trainer: StoredTrainer) -> str:
    """min or max: `trainer.best_mode` of `trainer.best_metric`, by its name of any other."""
    given = trainer.best_mode if metric == trainer.best_metric else None
    return given or ("min" if lower_is_better(metric) else "max")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"
