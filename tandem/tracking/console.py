"""What a person watches: one line a step."""

from __future__ import annotations

import time
from datetime import timedelta

from tandem.types import StepMetrics

_SHOWN = (
    "reward/mean", "sft/loss", "response_length/mean", "actor/entropy", "actor/kl", "actor/grad_norm",
    "critic/vf_explained_var", "time/step_s",
)  # fmt: skip
"""In the order shown; besides these, every `val/` metric."""


class ConsoleTracker:
    """Key metrics and the time left; `first_step` is the step before the first one logged (a resumed run's start)."""

    def __init__(self, total_steps: int, first_step: int = 0) -> None:
        self._total, self._first = total_steps, first_step
        self._started_s = time.monotonic()

    def log(self, step: int, metrics: StepMetrics) -> None:
        names = [*_SHOWN, *(name for name in metrics if name.startswith("val/"))]
        shown = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
        done = step - self._first
        left_s = (time.monotonic() - self._started_s) / done * (self._total - step) if done else None
        left = "unknown" if left_s is None else timedelta(seconds=round(left_s))
        print(f"step {step}/{self._total}", *shown, f"left {left}", sep="  ", flush=True)

    def close(self) -> None: ...
