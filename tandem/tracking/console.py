"""What a person watches: a progress bar on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.types import StepMetrics

_SHOWN = {
    "reward/mean": "reward",
    "sft/loss": "loss",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/kl": "kl",
    "actor/grad_norm": "grad",
    "critic/vf_explained_var": "explained var",
    "time/step_s": "s/step",
}
"""Metric to its short name, in the order shown; besides these, every `val/` metric."""


class ConsoleTracker:
    """Key metrics and the time left; `first_step` is the step before the first one logged (a resumed run's start)."""

    def __init__(self, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total, self._first = total_steps, first_step
        self._started_s = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, step: int, metrics: StepMetrics) -> None:
        validation = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val/")]
        shown = [f"{short} {metrics[name]:.4g}" for name, short in _SHOWN.items() if name in metrics]
        if self._progress is None:
            self._print(f"step {step}/{self._total}", *shown, *validation, f"left {self._left(step)}")
            return
        if validation:
            self._print(f"step {step}", *validation)
        self._progress.update(self._task, completed=step, description="  ".join(shown))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print(self, *parts: str) -> None:
        self._console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        if step <= self._first:
            return "unknown"
        seconds_per_step = (time.monotonic() - self._started_s) / (step - self._first)
        return str(timedelta(seconds=round(seconds_per_step * max(self._total - step, 0))))
