"""What every training run has around its steps: the run directory, records, checkpoints, validation, a way to stop."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Protocol

from tandem.activity import begin
from tandem.checkpoint.draft import Draft
from tandem.checkpoint.fork import Fork, fork_of, special_optimizers
from tandem.checkpoint.progress import Progress
from tandem.checkpoint.remote import RemoteCheckpoints
from tandem.checkpoint.run_dir import open_run_dir
from tandem.checkpoint.store import CheckpointStore
from tandem.config.tree import SftConfig, TrainConfig
from tandem.controller.placement import Placement
from tandem.errors import StepGivenUp, TandemError, WorkerLost
from tandem.files import writing
from tandem.jobs.best_checkpoint import BestValue
from tandem.jobs.callbacks import Callback, Callbacks, RunControl
from tandem.jobs.resume_schedule import schedule_changes
from tandem.jobs.runs import ENDED, write_end
from tandem.output import output_may_end
from tandem.signals import StopReason, StopRequest, in_words
from tandem.tracking.base import Ended, Recorder
from tandem.tracking.console import ConsoleRecorder, Startup
from tandem.tracking.jsonl import JsonlRecorder
from tandem.tracking.report import write_report
from tandem.tracking.run_environment import write_environment
from tandem.tracking.tracker_thread import TrackerThread
from tandem.tracking.trackers import chosen_trackers
from tandem.types import StepMetrics


class Job(Protocol):
    """One kind of training. Steps count from 1, their metrics name `perf/tokens`; what they depend on is saved."""

    total_steps: int
    placement: Placement
    """Where the job's workers run; closed with the job."""

    def step(self, step: int) -> StepMetrics: ...

    def evaluate(self, step: int) -> StepMetrics: ...

    def save(self, draft: Draft) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Position:
    """Where the run stands."""

    step: int = 0
    saved_step: int = 0
    """The step of the last checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    """When that was written, or the run began."""


@contextmanager
def claim_run_dir(config: TrainConfig | SftConfig) -> Iterator[None]:
    """Make `trainer.run_dir` this run's, and this process the only one that writes it.

    Raises UserError when it holds something else, or another process is writing it; and as `RemoteCheckpoints.claim`.
    """
    with output_may_end(), open_run_dir(config) as changed:
        if config.trainer.checkpoint_url is not None:
            RemoteCheckpoints(config.trainer.checkpoint_url).claim(config.trainer.run_dir)
        for change in changed:
            print(f"changed since the last start: {change}", flush=True)
        run_dir = config.trainer.run_dir
        with writing(run_dir / "environment.json"):
            write_environment(run_dir, config.trainer.seed)
        with writing(run_dir / ENDED):
            (run_dir / ENDED).unlink(missing_ok=True)
        try:
            yield
        except KeyboardInterrupt:
            _tell_end(run_dir, "stopped", "Ctrl-C twice")
            raise
        except Exception as error:
            told = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
            _tell_end(run_dir, "failed", told.strip().partition("\n")[0])
            raise


def _tell_end(run_dir: Path, state: str, reason: str) -> None:
    """Unless the run has ended before what went wrong, as its report. What ends the run is told in any case: where this
    cannot be written, that is not."""
    if not (run_dir / ENDED).exists():
        with suppress(OSError):
            write_end(run_dir, state, reason)


def find_start(config: TrainConfig | SftConfig, resume: bool) -> Path | Fork | None:
    """Where the next step begins: after a checkpoint of the run, on a fork of another run, or (None) at nothing.

    Reads all of the checkpoint; raises UserError when it is damaged.
    """
    store = CheckpointStore(config.trainer.run_dir, config.trainer.keep_last)
    if resume:
        if (checkpoint := store.latest()) is not None:
            return checkpoint
        print(f"no checkpoint in {store.directory}: beginning at step 1", flush=True)
    fork = fork_of(config)
    if fork is not None:
        fork.check_sound()
    return fork


def run_job(
    config: TrainConfig | SftConfig, make_job: Callable[[Fork | None], Job], callbacks: Sequence[Callback] = ()
) -> StopReason | None:
    """Run the job to its last step (None) or to a stop (what asked for it), from the last checkpoint if any.

    `make_job` makes the job before its first step; it is given the fork that it starts from, if it is to start from
    one. When workers are lost the job is made anew and goes on from the last checkpoint, `trainer.max_restarts` times
    without getting further than before.
    """
    restarts, stop = config.trainer.max_restarts, StopRequest()
    used = reached = 0
    is_first = True
    while True:
        attempt: _Attempt | None = None
        try:
            start = find_start(config, resume=config.trainer.resume or not is_first)
            is_first = False
            with Startup("starting processes and loading models"):
                job = make_job(start if isinstance(start, Fork) else None)
            attempt = _Attempt(config, job, stop, callbacks)
            finished = attempt.run(start if isinstance(start, Path) else None)
            return None if finished else stop.by
        except WorkerLost as error:
            if stop.by is not None:  # they, too, may have heard the signal
                print(f"{error}\nlost while stopping; the last checkpoint is that of an earlier step", flush=True)
                _tell_end(config.trainer.run_dir, "stopped", f"{in_words(stop.by)}; workers were lost meanwhile")
                return stop.by
            step = attempt.step if attempt else 0
            used, reached = 1 if step > reached else used + 1, max(reached, step)
            if used > restarts:
                raise
            print(f"{error}\nrestarting from the last checkpoint ({used} of {restarts} restarts)", flush=True)


class _Attempt:
    """A job from its first step, or from a checkpoint, as far as it gets. It closes the job."""

    def __init__(
        self, config: TrainConfig | SftConfig, job: Job, stop: StopRequest, callbacks: Sequence[Callback]
    ) -> None:
        self._config = config
        self._trainer = config.trainer
        self._job = job
        self._stop = stop
        self._callbacks = Callbacks(callbacks, RunControl(config.trainer.run_dir, job.total_steps, stop))
        self._best = BestValue(config.trainer)
        self._position = _Position()
        watch = partial(job.placement.watch, 0.0)
        url = config.trainer.checkpoint_url
        remote = RemoteCheckpoints(url) if url else None
        self._store = CheckpointStore(config.trainer.run_dir, config.trainer.keep_last, watch, remote)
        self._recorders: list[Recorder] = []
        self._saving: StepMetrics = {}
        """What the last checkpoint cost: metrics of the step after it."""

    @property
    def step(self) -> int:
        """The last one that it has trained."""
        return self._position.step

    def run(self, checkpoint: Path | None) -> bool:
        """False: it was asked to stop, and has saved the step that it was at."""
        job = self._job
        ended: Ended = "killed"
        try:
            if checkpoint is not None:
                self._restore(checkpoint)
                self._store.copy(checkpoint)
            self._recorders += _recorders(self._config, job.total_steps, self._position.step)
            with self._stop.listening(), _known_to_stay():
                try:
                    self._train()
                except StepGivenUp as error:
                    print(f"{self._told_to_stop}: step {self._position.step + 1} is given up: {error}", flush=True)
                if self._position.step > self._position.saved_step:
                    self._save()
                self._store.finish()
                self._tell_saved()
            ended = "finished" if self._position.step >= job.total_steps else "stopped"
        except WorkerLost as lost:
            ended = "failed"
            self._save_what_is_whole(lost)
            raise
        except Exception:
            ended = "failed"
            with suppress(TandemError):  # what ends the run is told; a rank that is gone ends this at once
                self._store.finish()
            raise
        finally:
            self._store.abandon()
            with ExitStack() as closing:  # each is closed, whatever another's end raises
                for recorder in self._recorders:
                    closing.callback(recorder.close, ended)
                closing.callback(job.close)
        with writing(self._trainer.run_dir / ENDED):
            reason = in_words(self._stop.by) if ended == "stopped" and self._stop.by is not None else ""
            write_end(self._trainer.run_dir, ended, reason)
        write_report(self._trainer.run_dir)
        return self._position.step >= job.total_steps

    @property
    def _told_to_stop(self) -> str:
        by = self._stop.by
        return by.name if isinstance(by, Signals) else str(by)

    def _train(self) -> None:
        """To the last step, or to a stop. Raises StepGivenUp where it does not end the step that it is at."""
        if self._position.step == 0 and self._trainer.eval_every:
            validated = self._evaluate(0)
            self._best.expect_in(validated, validation=True)
            self._record(0, validated)
            self._callbacks.evaluated(0, validated)
        while self._position.step < self._job.total_steps and self._stop.by is None:
            self._step(self._position.step + 1)

    def _step(self, step: int) -> None:
        job, trainer, position = self._job, self._trainer, self._position
        start = time.perf_counter()
        begin("training")
        metrics = job.step(step)
        metrics |= job.placement.costs(metrics["perf/tokens"], time.perf_counter() - start) | self._saving
        self._saving = {}
        self._store.check()
        self._tell_saved()
        validated = self._evaluate_trained(step) if self._is_due(step, trainer.eval_every) else {}
        metrics |= validated
        position.step = step
        if step == 1:
            self._best.expect_in(metrics, validation=False)
        best = self._best.improves(metrics, step)
        self._record(step, metrics)  # before the checkpoint: a resumed run repeats a record, but never lacks one
        late = 0 < trainer.save_every_s <= time.monotonic() - position.saved_at
        if best or late or self._is_due(step, trainer.save_every):
            self._save()
        self._callbacks.stepped(step, metrics)
        if validated:
            self._callbacks.evaluated(step, validated)

    def _save_what_is_whole(self, lost: WorkerLost) -> None:
        """The last step, where the trainer stands there and its processes live; else the last checkpoint stays so."""
        is_behind = self._position.step > self._position.saved_step
        with suppress(TandemError):  # what ends the run is told; a rank that is gone ends this at once
            if lost.trainer_is_whole and is_behind:
                self._save()
            self._store.finish()
            if lost.trainer_is_whole and is_behind:
                print(f"saved after step {self._position.step}: workers were lost, and the trainer was not", flush=True)

    def _evaluate(self, step: int) -> StepMetrics:
        begin("validation")
        return self._job.evaluate(step)

    def _evaluate_trained(self, step: int) -> StepMetrics:
        """Nothing where the run is to stop, and rewards of the validation do not come: the step is trained."""
        try:
            return self._evaluate(step)
        except StepGivenUp as error:
            print(f"{self._told_to_stop}: the validation after step {step} is given up: {error}", flush=True)
            return {}

    def _tell_saved(self) -> None:
        """Of a checkpoint that has become complete since the last call."""
        done, self._store.completed = self._store.completed, None
        if done is not None:
            self._callbacks.saved(done)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step == self._job.total_steps or step % every == 0)

    def _save(self) -> None:
        position = self._position
        begin("checkpoint")
        start = time.monotonic()
        self._store.finish()
        self._tell_saved()
        self._saving = {"time/checkpoint_wait_s": time.monotonic() - start}
        with self._store.write(position.step, self._best.step) as draft:
            self._job.save(draft)
            kinds = self._config.training.type, self._best.state(), special_optimizers(self._config)
            Progress(position.step, self._job.total_steps, *kinds).write(draft.directory)
        position.saved_step, position.saved_at = position.step, time.monotonic()
        self._saving["time/checkpoint_s"] = position.saved_at - start

    def _restore(self, checkpoint: Path) -> None:
        saved = Progress.read(checkpoint)
        self._job.load(checkpoint)
        self._position = _Position(saved.step, saved_step=saved.step)
        self._best.load_state(saved.best)
        self._best.stands_at(self._store.best_of(self._best.step, checkpoint))
        print(f"resuming after step {saved.step} from {checkpoint}", flush=True)
        if saved.step >= self._job.total_steps:
            print(f"no step is left: the run has {self._job.total_steps}; trainer.steps=N lets it go on", flush=True)
        for change in schedule_changes(self._config, saved.step, saved.total_steps, self._job.total_steps):
            print(change, flush=True)

    def _record(self, step: int, metrics: StepMetrics) -> None:
        for recorder in self._recorders:
            recorder.log(step, metrics)


@contextmanager
def _known_to_stay() -> Iterator[None]:
    """What is there now, a million objects of libraries most of them, is nothing that Python's search for cycles need
    look through again: that takes as long as five short steps, and comes in the middle of one."""
    gc.collect()  # a model of an earlier run is a cycle
    own = gc.get_freeze_count() == 0  # else who called has said what stays
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def _recorders(config: TrainConfig | SftConfig, total_steps: int, first_step: int) -> list[Recorder]:
    """metrics.jsonl is first: what goes on behind the steps reads it."""
    run_dir = config.trainer.run_dir
    recorders: list[Recorder] = [JsonlRecorder(run_dir / "metrics.jsonl"), ConsoleRecorder(total_steps, first_step)]
    for chosen in chosen_trackers(config.tracking):
        recorders.append(TrackerThread(chosen.name, chosen.make, chosen.options, run_dir, first_step))
    return recorders
