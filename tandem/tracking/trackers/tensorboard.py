"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.config.trackers import TrackerConfig
from tandem.tracking.base import Ended, Sample, TrackedRun, Tracker

if TYPE_CHECKING:
    from tandem.types import StepMetrics


class TensorBoardConfig(TrackerConfig):
    """Write event files into `<run_dir>/tensorboard` (the extra `tensorboard`)."""


class TensorBoardTracker(Tracker):
    """One scalar a metric, a text for the samples of a step. What earlier event files say of later steps is hidden."""

    package = "tensorboard"

    def __init__(self, options: TensorBoardConfig, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.last_step + 1)

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:
        blocks = [
            "\n\n".join((f"reward {s.reward}, advantage {s.advantage}", _quoted(s.prompt), _quoted(s.answer)))
            for s in samples
        ]
        self._writer.add_text(table, "\n\n---\n\n".join(blocks), step)
        for number, sample in enumerate(samples):
            for place, pixels in enumerate(sample.pictures):
                self._writer.add_image(f"{table}/{number}/{place}", pixels, step, dataformats="HWC")

    def log(self, step: int, metrics: StepMetrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _quoted(text: str) -> str:
    """As a block of Markdown code: what a model writes is no markup."""
    return "\n".join(f"    {line}" for line in text.splitlines())
