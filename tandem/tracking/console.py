"""What a person watches: a live display on a terminal and in a notebook, one plain line a step elsewhere.

step  12/100 ━━━━━━━╺━━━━━━━━━━━━━━━━━━━ 0:01:23 left
reward/mean=0.41  response_length/mean=7.9  tokens/s=1,234  time/step_s=0.81
generation 37/64 prompts, 3 s
[2, 4, 1, 3] -> [1, 2, 3, 4]  reward 1
"""

import io
import time
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tandem.activity import Activity, Shown, begin, current
from tandem.tracking.base import Ended, Recorder
from tandem.types import StepMetrics

_SHOWN = (
    "reward/mean", "sft/loss", "dpo/loss", "reward_model/loss", "response_length/mean", "actor/entropy", "actor/kl",
    "actor/grad_norm", "critic/vf_explained_var", "time/step_s",
)  # fmt: skip
"""The metrics of a line, in the order shown; besides these, every `val/` metric."""
_BAR = 24
_RECENT = 20
"""Steps from whose times the time left is estimated."""
_FRAMES_PER_S = 5
_NOTEBOOK_FRAMES_PER_S = 2
"""Each is a message to the page."""


class ConsoleRecorder(Recorder):
    """Key metrics, and where somebody watches what is done at this moment and the time left; `first_step` is where a
    resumed run starts."""

    def __init__(self, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._display = _Display(total_steps, first_step)
        self._total = total_steps
        self._live: Live | _Cell | None = None
        if self._console.is_terminal:
            self._live = Live(self._display, console=self._console, refresh_per_second=_FRAMES_PER_S)
            self._live.start(refresh=True)
        elif self._console.is_jupyter:
            self._live = _Cell(self._display)

    def log(self, step: int, metrics: StepMetrics) -> None:
        key = {name: f"{metrics[name]:.4g}" for name in _SHOWN if name in metrics}
        printed = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val/")]
        if self._live is None:
            printed = [f"{name} {value}" for name, value in key.items()] + printed
        else:
            self._display.stepped(step, key, metrics.get("perf/tokens_per_s"))
            self._live.refresh()
        if printed:
            text = "  ".join([f"step {step}/{self._total}", *printed])
            self._console.print(text, markup=False, highlight=False, soft_wrap=self._live is None)

    def close(self, ended: Ended) -> None:
        if self._live is not None:
            begin(ended)
            self._live.stop()


class _Display:
    """The lines of a terminal, drawn some times a second: whatever is long moves, also while a step computes."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._total, self._step = total_steps, first_step
        self._metrics = Text()
        self._ends = [time.monotonic()]
        """When the last steps ended, oldest first; the first one: when the display began."""
        self._spinner = Spinner("dots")

    def stepped(self, step: int, metrics: dict[str, str], tokens_per_s: float | None) -> None:
        """A step has ended, with these metrics."""
        before = self._ends if step > self._step else []  # a validation before the first step is no step
        self._ends = [*before, time.monotonic()][-_RECENT - 1 :]
        self._step = step
        speed = {} if tokens_per_s is None else {"tokens/s": f"{tokens_per_s:,.0f}"}
        unbroken = [f"{name}={value}" for name, value in (metrics | speed).items()]
        self._metrics = Text("  ".join(unbroken)) if unbroken else self._metrics

    def __rich__(self) -> RenderableType:
        activity, answer = current()
        under_way = _line(self._spinner, activity)
        lines = [self._steps(), self._metrics, under_way, Text() if answer is None else _row(answer)]
        return Group(*(line for line in lines if line))

    def _steps(self) -> RenderableType:
        width = len(str(self._total))
        bar = ProgressBar(self._total, self._step, width=_BAR)
        row = Table.grid(padding=(0, 1))
        row.add_row(f"step {self._step:>{width}}/{self._total}", bar, f"{self._left()} left")
        return row

    def _left(self) -> str:
        """The time that is left, at the speed of the last steps."""
        known = len(self._ends) - 1
        if known == 0:
            return "-:--:--"
        seconds = (self._ends[-1] - self._ends[0]) / known * (self._total - self._step)
        return str(timedelta(seconds=round(seconds)))


class _Cell:
    """The output of a notebook's cell that shows a display, drawn some times a second by a thread."""

    def __init__(self, display: _Display) -> None:
        from IPython.display import display as show

        self._display = display
        self._handle: Any = show(self._drawn(), raw=True, display_id=True)
        self._stopped = Event()
        self._thread = Thread(target=self._draw, name="notebook display", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """The thread will."""

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._handle.update(self._drawn(), raw=True)

    def _draw(self) -> None:
        while not self._stopped.wait(1 / _NOTEBOOK_FRAMES_PER_S):
            self._handle.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, str]:
        page = Console(file=io.StringIO(), width=80, color_system=None, force_jupyter=False)
        with page.capture() as drawn:
            page.print(self._display)
        return {"text/plain": drawn.get()}


class Startup:
    """A context: on a terminal it shows what is done, from this stage on, before there are steps."""

    def __init__(self, stage: str) -> None:
        begin(stage)
        console, spinner = Console(), Spinner("dots")
        self._live = Live(
            get_renderable=lambda: _line(spinner, current()[0]),
            console=console,
            transient=True,
            refresh_per_second=_FRAMES_PER_S,
        )
        self._watched = console.is_terminal

    def __enter__(self) -> None:
        if self._watched:
            self._live.start(refresh=True)

    def __exit__(self, *_: object) -> None:
        if self._watched:
            self._live.stop()


def _line(spinner: Spinner, activity: Activity) -> RenderableType:
    seconds = time.monotonic() - activity.since
    counted = f" {activity.done:,}/{activity.total:,} {activity.unit}{activity.note}" if activity.done else ""
    spinner.update(text=Text(f"{activity.stage}{counted}, {seconds:.0f} s", no_wrap=True, overflow="ellipsis"))
    return spinner if activity.stage else Text()


def _row(answer: Shown) -> Text:
    """One line of it; text that a model wrote is not markup."""
    reward = "no reward" if answer.reward is None else f"reward {answer.reward:.4g}"
    prompt, written = _ending(answer.prompt, 30), _beginning(answer.answer, 80)
    return Text(f"{reward}: {prompt} -> {written}", style="dim", no_wrap=True, overflow="ellipsis")


def _beginning(text: str, characters: int) -> str:
    return _visible(text[: 2 * characters])[:characters]


def _ending(text: str, characters: int) -> str:
    whole = _visible(text[-2 * characters :])
    return whole if len(whole) <= characters else f"…{whole[-characters:]}"


def _visible(text: str) -> str:
    """Without line ends and what would move the cursor."""
    return "".join(one if one.isprintable() else " " for one in " ".join(text.split()))
