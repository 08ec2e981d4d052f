"""What a person watches: a progress bar on a terminal, one plain line a step elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.types import StepMetrics

_SHOWN = (
    "reward/mean", "sft/loss", "response_length/mean", "actor/entropy", "actor/kl", "actor/grad_norm",
    "critic/vf_explained_var", "time/step_s",
)  # fmt: skip
"""In the order shown; besides these, every `val/` metric."""


class ConsoleTracker:
    """Key metrics, and on a terminal the time left; `first_step` is where a resumed run starts."""

    def __init__(self, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        columns = (
            MofNCompleteColumn(),
            BarColumn(20),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(TextColumn("step"), *columns, console=self._console)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._total = total_steps
        if self._console.is_terminal:
            self._progress.start()

    def log(self, step: int, metrics: StepMetrics) -> None:
        shown = [f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics]
        validation = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val/")]
        if not self._console.is_terminal:
            self._print(step, shown + validation)
            return
        if validation:
            self._print(step, validation)
        self._progress.update(self._task, completed=step, description="  ".join(shown))

    def close(self) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def _print(self, step: int, parts: list[str]) -> None:
        text = "  ".join([f"step {step}/{self._total}", *parts])
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
