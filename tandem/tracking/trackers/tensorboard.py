"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.base import Section
from tandem.tracking.base import Tracker

if TYPE_CHECKING:
    from tandem.types import StepMetrics


class TensorBoardConfig(Section):
    """Write event files into `<run_dir>/tensorboard` (the extra `tensorboard`)."""


class TensorBoardTracker(Tracker):
    """One scalar a metric. What earlier event files say of steps after `first_step` is hidden."""

    package = "tensorboard"

    def __init__(self, config: TensorBoardConfig, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, metrics: StepMetrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
