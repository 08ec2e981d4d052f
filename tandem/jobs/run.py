"""What every training run has around its steps: the run directory, records, checkpoints, validation, Ctrl-C."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.checkpoint.run_dir import open_run_dir
from tandem.checkpoint.store import CheckpointStore
from tandem.config.tree import SftConfig, TrainConfig, TrainerConfig
from tandem.controller.placement import Placement
from tandem.errors import WorkerLost
from tandem.files import write_text
from tandem.tracking.base import Tracker
from tandem.tracking.console import ConsoleTracker
from tandem.tracking.environment import write_environment
from tandem.tracking.jsonl import JsonlTracker
from tandem.tracking.report import write_report
from tandem.types import StepMetrics


class Job(Protocol):
    """One kind of training. Steps count from 1, their metrics name `perf/tokens`; what they depend on is saved."""

    total_steps: int
    placement: Placement
    """Of its workers; closed with the job."""

    def step(self, step: int) -> StepMetrics: ...

    def evaluate(self, step: int) -> StepMetrics: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Progress:
    """Where the run stands; `step` and `best` are saved with every checkpoint."""

    step: int = 0
    best: float | None = None
    """The highest value of `trainer.best_metric` so far."""
    stop: bool = False

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C asks the run to stop after the step in hand; a second one stops it at once."""

        def ask(signum: int, frame: object) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = True
            print("\nstopping after this step (Ctrl-C again: at once, back to the last checkpoint)", flush=True)

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def claim_run_dir(config: TrainConfig | SftConfig) -> None:
    """Make `trainer.run_dir` this run's; raises UserError when it holds something else."""
    for change in open_run_dir(config):
        print(f"changed since the run was started: {change}", flush=True)
    write_environment(config.trainer.run_dir, config.trainer.seed)


def run_job(config: TrainConfig | SftConfig, make_job: Callable[[], Job]) -> bool:
    """Run the job to its last step or to Ctrl-C (then False), from the last checkpoint where there is one.

    When workers are lost the job is made anew and goes on from the last checkpoint, `trainer.max_restarts` times.
    """
    restarts = config.trainer.max_restarts
    for left in range(restarts, -1, -1):
        try:
            return _run_once(config, make_job(), resume=config.trainer.resume or left < restarts)
        except WorkerLost as error:
            if left == 0:
                raise
            print(f"{error}\nrestarting from the last checkpoint ({left} restarts left)", flush=True)
    raise AssertionError("unreachable")


def _run_once(config: TrainConfig | SftConfig, job: Job, resume: bool) -> bool:
    trainer = config.trainer
    closing: list[Tracker | Job] = [job]
    try:
        store = CheckpointStore(trainer.run_dir, trainer.keep_last)
        progress = _restore(job, store) if resume else _Progress()
        trackers = _trackers(config, job.total_steps, progress.step)
        closing += trackers
        with progress.stopped_by_ctrl_c():
            if progress.step == 0 and trainer.eval_every:
                _record(trackers, 0, job.evaluate(0))
            while progress.step < job.total_steps and not progress.stop:
                _one_step(trainer, job, store, progress, trackers)
    finally:
        for one in closing:
            one.close()
    write_report(trainer.run_dir)
    return progress.step == job.total_steps


def _one_step(
    trainer: TrainerConfig, job: Job, store: CheckpointStore, progress: _Progress, trackers: list[Tracker]
) -> None:
    step = progress.step + 1
    last = step == job.total_steps

    def due(every: int) -> bool:
        return every > 0 and (last or step % every == 0)

    start = time.perf_counter()
    metrics = job.step(step)
    metrics |= job.placement.costs(metrics["perf/tokens"], time.perf_counter() - start)
    if due(trainer.eval_every):
        metrics |= job.evaluate(step)
    progress.step = step
    reached = metrics.get(trainer.best_metric or "")
    best = reached is not None and (progress.best is None or reached > progress.best)
    if best:
        progress.best = reached
    _record(trackers, step, metrics)  # before the checkpoint: a resumed run repeats a record, but never lacks one
    if last or best or progress.stop or due(trainer.save_every):
        with store.write(step, best) as directory:
            for part in ("model", "state"):
                (directory / part).mkdir()
            job.save(directory)
            write_text(directory / "state" / "run.json", json.dumps({"step": step, "best": progress.best}))


def _restore(job: Job, store: CheckpointStore) -> _Progress:
    checkpoint = store.latest()
    if checkpoint is None:
        return _Progress()
    job.load(checkpoint)
    progress = _Progress(**json.loads((checkpoint / "state" / "run.json").read_text(encoding="utf-8")))
    print(f"resuming after step {progress.step} from {checkpoint}")
    return progress


def _trackers(config: TrainConfig | SftConfig, total_steps: int, first_step: int) -> list[Tracker]:
    run_dir = config.trainer.run_dir
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl"), ConsoleTracker(total_steps, first_step)]
    if config.tracking.tensorboard:
        from tandem.tracking.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(run_dir / "tensorboard", first_step))
    return trackers


def _record(trackers: list[Tracker], step: int, metrics: StepMetrics) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)
