"""TensorBoard event files."""

from pathlib import Path

from tandem.errors import UserError
from tandem.types import StepMetrics


class TensorBoardTracker:
    """One scalar a metric. What earlier event files say of steps after `first_step` is hidden."""

    def __init__(self, directory: Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            mend = "install it with: pip install 'tandem-rl[tensorboard]'"
            raise UserError(f"tracking.tensorboard: tensorboard cannot be imported ({error}); {mend}") from error
        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def log(self, step: int, metrics: StepMetrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
