"""A tracker behind the steps: down, slow or broken, it neither stops nor slows the run.

    consumes      lines of metrics.jsonl, on a thread of its own; files of trajectories, for tables of samples
    produces      calls of the tracker, in the order of the steps; trackers/NAME.json: the run's id, the last step sent
    waits for     the next line; after a failure 1, 2, 4 … 60 seconds, then the same call is made again
    unblocked by  log() and close(), which waits for it `close_timeout_s` at most

metrics.jsonl is the record, and a tracker is as far behind it as it is. What it lacks at the end of a process, whatever
ended that, it gets when the run is resumed, also where the run has no steps left. Steps that a resumed run repeats are
not sent again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from tandem.config.stored_run import pictures_of_run
from tandem.config.trackers import TrackerConfig
from tandem.files import users_traceback, write_text
from tandem.pictures.store import PictureStore
from tandem.signals import stop_signals_blocked
from tandem.stored import DamagedFile, read_json
from tandem.tracking.base import Ended, Recorder, TrackedRun, Tracker
from tandem.tracking.described import described
from tandem.tracking.jsonl import each_record, record_of
from tandem.tracking.samples import table_of
from tandem.tracking.trajectories import trajectories_path, validation_path
from tandem.types import StepMetrics

T = TypeVar("T")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


class _GivenUp(Exception):
    """The run has ended, and the last try has failed."""


@dataclass(frozen=True, slots=True)
class _State:
    """What `trackers/NAME.json` holds."""

    id: str
    """The run's, at this tracker."""
    step: int
    """The last one that was sent."""


class TrackerThread(Recorder):
    """Runs one tracker. `name` is how messages and files call it; `first_step` is where a resumed run starts."""

    def __init__(
        self, name: str, make: Callable[[TrackedRun], Tracker], options: TrackerConfig, run_dir: Path, first_step: int
    ) -> None:
        self._name, self._make, self._options = name, make, options
        self._run_dir, self._first_step = run_dir, first_step
        self._metrics = run_dir / "metrics.jsonl"
        self._state = run_dir / "trackers" / f"{name}.json"
        self._offset = self._metrics.stat().st_size if self._metrics.exists() else 0
        state = self._read_state()
        self._sent, self._id = state.step, state.id
        self._newest, self._failures, self._failed_samples = first_step, 0, 0
        self._last_error = ""
        self._more, self._closing = Event(), Event()
        self._ended: Ended = "killed"
        self._thread = Thread(target=self._run, name=f"tracker {name}", daemon=True)
        with stop_signals_blocked():  # the thread, and the processes that it starts, leave them to the controller
            self._thread.start()

    def log(self, step: int, metrics: StepMetrics) -> None:
        """The step's line is in metrics.jsonl by now."""
        self._newest = max(step, self._newest)
        self._more.set()

    def close(self, ended: Ended) -> None:
        self._ended = ended
        self._closing.set()
        self._more.set()
        if ended == "killed":
            return
        self._thread.join(self._options.close_timeout_s)
        if self._failures or self._failed_samples or self._thread.is_alive():
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        parts = [f"{self._failures} failed calls" if self._failures else "it has not answered in time"]
        if self._failed_samples:
            parts.append(f"{self._failed_samples} tables of samples were not taken")
        if self._sent < self._newest:
            where = f"the steps after {self._sent} are not there" if self._sent >= 0 else "no step is there"
            parts.append(f"{where}; resuming the run, even a finished one, sends them")
        elif self._thread.is_alive():
            parts.append(f"it did not close within {self._options.close_timeout_s:g} s")
        else:
            parts.append("every step is there")
        self._say("; ".join(parts))

    def _say(self, message: str) -> None:
        print(f"tracking.{self._name}: {message}", flush=True)

    def _run(self) -> None:
        try:
            tracker = self._until_it_succeeds(self._open)
            for step, metrics in self._unsent():
                self._send_samples(tracker, step, metrics)
                self._until_it_succeeds(lambda step=step, metrics=metrics: tracker.log(step, metrics))
                self._sent = step
                self._until_it_succeeds(self._write_state)
            if self._ended != "killed":
                self._until_it_succeeds(lambda: tracker.close(self._ended))
        except ValueError as error:  # metrics.jsonl holds what is no record of a step
            self._failures += 1
            self._say(f"{error}; what it lacks is not sent")
        except _GivenUp:
            pass

    def _open(self) -> Tracker:
        self._write_state()  # so that another process finds the same record, however soon this one is killed
        config, environment = described(self._run_dir)
        tracker = self._make(TrackedRun(self._run_dir, self._id, self._sent, config, environment))
        if tracker.last_step is not None:
            self._sent = tracker.last_step
        return tracker

    def _unsent(self) -> Iterator[tuple[int, StepMetrics]]:
        """Steps that the tracker lacks, as they come; ends when the run does."""
        for record in each_record(self._metrics):
            if self._sent < record["step"] <= self._first_step:
                yield _parted(record)
        while True:
            ends = self._closing.is_set()  # asked before the last look
            self._more.clear()
            yield from self._new_lines()
            if ends:
                return
            self._more.wait()

    def _new_lines(self) -> Iterator[tuple[int, StepMetrics]]:
        while self._metrics.exists():
            with self._metrics.open("rb") as file:
                file.seek(self._offset)
                line = file.readline()
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            record = record_of(line)
            if record is not None and record["step"] > self._sent:
                yield _parted(record)

    def _send_samples(self, tracker: Tracker, step: int, metrics: StepMetrics) -> None:
        every = self._options.samples_every
        if not every:
            return
        files: dict[str, Path] = {}
        if step and step % every == 0:
            files["samples"] = trajectories_path(self._run_dir, step)
        if any(name.startswith("val/") for name in metrics):
            files["validation_samples"] = validation_path(self._run_dir, step)
        for table, path in files.items():
            try:
                if path.exists():
                    pictures = PictureStore(pictures_of_run(self._run_dir))
                    tracker.log_samples(step, table, table_of(path, self._options.samples, pictures))
            except Exception as error:  # noqa: BLE001  a package or the user's code may raise anything
                self._failed_samples += 1
                if self._failed_samples == 1:
                    self._say(f"{table} of step {step} were not taken; the run goes on:\n{self._shown(error)}")

    def _until_it_succeeds(self, call: Callable[[], T]) -> T:
        wait_s = _FIRST_WAIT_S
        while True:
            last = self._closing.is_set()
            try:
                return call()
            except BaseException as error:  # as above; some packages even exit
                self._failures += 1
                if self._failures == 1:
                    self._say(f"{self._shown(error)}\nThe run goes on, and this is tried again until it ends.")
                if last:
                    raise _GivenUp from error
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _shown(self, error: BaseException) -> str:
        own = self._name.startswith("own")
        return users_traceback(error, __file__) if own else f"{type(error).__name__}: {error}"

    def _read_state(self) -> _State:
        """Where there is none, or none that can be read, a new record is begun."""
        if self._state.exists():
            try:
                return read_json(self._state, _State)
            except DamagedFile as error:
                self._say(f"{error}; a new record is begun there")
        return _State(secrets.token_hex(8), -1)

    def _write_state(self) -> None:
        self._state.parent.mkdir(exist_ok=True)
        write_text(self._state, json.dumps(asdict(_State(self._id, self._sent))) + "\n")


def _parted(record: dict[str, float]) -> tuple[int, StepMetrics]:
    return int(record["step"]), {name: value for name, value in record.items() if name != "step"}
