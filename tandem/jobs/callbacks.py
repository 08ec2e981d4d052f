"""What a program of the user's own does while a run goes on: after its steps, validations and checkpoints."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tandem.errors import CallbackFailed
from tandem.files import users_traceback
from tandem.signals import StopRequest
from tandem.types import StepMetrics


class RunControl:
    """The run, as its callbacks see it."""

    def __init__(self, run_dir: Path, total_steps: int, stop: StopRequest) -> None:
        self.run_dir = run_dir
        self.total_steps = total_steps
        self._stop = stop

    def stop(self, reason: str) -> None:
        """Ask the run to stop after the step in hand, as a signal does: it saves a checkpoint, and may be resumed."""
        self._stop.ask(reason)


class Callback:
    """Override what is of interest. All are called in the process that made the Trainer, and the run waits for them.

    Each is called with the step, which counts from 1. What one raises ends the run with `tandem.CallbackFailed`. A run
    that goes on from a checkpoint, for workers were lost or it was resumed, repeats the steps after that.
    """

    def on_step(self, run: RunControl, step: int, metrics: StepMetrics) -> None:
        """A step has been trained and recorded; `metrics` is what metrics.jsonl has of it."""

    def on_eval(self, run: RunControl, step: int, metrics: StepMetrics) -> None:
        """The weights of `step` have been validated, those of step 0 before training; `metrics` are those of `val/`."""

    def on_save(self, run: RunControl, step: int, checkpoint: Path) -> None:
        """The checkpoint of `step` is complete on the disk; its model is the Hugging Face directory `model` in it.
        Files are written beside the next steps, so this comes one or several steps later, or at the end of the run."""


class Callbacks:
    """Those of a run, in the order in which they were given."""

    def __init__(self, each: Sequence[Callback], run: RunControl) -> None:
        self._each = each
        self._run = run

    def stepped(self, step: int, metrics: StepMetrics) -> None:
        for one in self._each:
            self._call(step, one.on_step, partial(one.on_step, self._run, step, dict(metrics)))

    def evaluated(self, step: int, metrics: StepMetrics) -> None:
        for one in self._each:
            self._call(step, one.on_eval, partial(one.on_eval, self._run, step, dict(metrics)))

    def saved(self, checkpoint: Path) -> None:
        step = int(checkpoint.name.removeprefix("step_"))
        for one in self._each:
            self._call(step, one.on_save, partial(one.on_save, self._run, step, checkpoint))

    def _call(self, step: int, method: Callable[..., Any], call: Callable[[], None]) -> None:
        """Raises CallbackFailed with the user's part of the traceback."""
        try:
            call()
        except Exception as error:  # the user's code may raise anything
            name = f"{type(method.__self__).__name__}.{method.__name__}"  # pyright: ignore[reportFunctionMemberAccess]
            shown = users_traceback(error, __file__)
            raise CallbackFailed(f"callback {name} failed at step {step}\n{shown}") from error
