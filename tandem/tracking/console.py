"""What a person watches: a progress bar on a terminal, one plain line a step elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from tandem.tracking.base import Ended, Recorder
from tandem.types import StepMetrics

_SHOWN = (
    "reward/mean", "sft/loss", "dpo/loss", "reward_model/loss", "response_length/mean", "actor/entropy", "actor/kl",
    "actor/grad_norm", "critic/vf_explained_var", "time/step_s",
)  # fmt: skip
"""The metrics of a line, in the order shown; besides these, every `val/` metric."""


class ConsoleTracker(Recorder):
    """Key metrics, and on a terminal the time left; `first_step` is where a resumed run starts."""

    def __init__(self, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        whole = Column(no_wrap=True)  # on a narrow terminal the metrics go on in the next line, the others stay
        columns = (
            TextColumn("step", table_column=whole),
            MofNCompleteColumn(table_column=whole),
            BarColumn(20, table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.description}", markup=False, table_column=Column()),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._total = total_steps
        self._progress.start()

    def log(self, step: int, metrics: StepMetrics) -> None:
        key = {name: f"{metrics[name]:.4g}" for name in _SHOWN if name in metrics}
        printed = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val/")]
        unbroken = "  ".join(f"{name}={value}" for name, value in key.items())
        self._progress.update(self._task, completed=step, description=unbroken)
        if not self._console.is_terminal:
            printed = [f"{name} {value}" for name, value in key.items()] + printed
        if printed:
            text = "  ".join([f"step {step}/{self._total}", *printed])
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, ended: Ended) -> None:
        self._progress.stop()
