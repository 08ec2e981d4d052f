"""The seams of tracking.

Recorder  what the loop calls after each step: metrics.jsonl, the console, and each tracker's thread
Tracker   which sends metrics and samples elsewhere: one file a package, or a class of the user's own
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from tandem.pictures.store import Pixels
    from tandem.types import StepMetrics

Ended = Literal["finished", "stopped", "failed", "killed"]
"""How a run ends here: at its last step, by a signal (it may go on), by an error; killed: at once, nobody may wait."""


class Recorder(ABC):
    """Receives each step once, in ascending order; a resumed run repeats the steps after its checkpoint."""

    @abstractmethod
    def log(self, step: int, metrics: StepMetrics) -> None:
        """Keep or show the metrics of one step; the loop waits for this."""

    @abstractmethod
    def close(self, ended: Ended) -> None:
        """Called once, after the last step."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of the run when it is made."""

    directory: Path
    id: str
    """Of this run at this tracker: 16 lowercase hexadecimal digits, the same whenever the run goes on."""
    last_step: int
    """The last step that the tracker has taken, as far as is known here; -1: none."""
    config: dict[str, Any]
    """The resolved configuration, what looks like a secret masked."""
    environment: dict[str, Any]
    """What environment.json holds."""

    @property
    def name(self) -> str:
        return self.directory.resolve().name


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of a table of answers."""

    prompt: str
    answer: str
    reward: float | None
    advantage: float | None
    """The mean over the answer's trained tokens; None in a validation."""
    pictures: tuple[Pixels, ...] = ()
    """The first of those that the prompt shows, small: `[height, width, 3]`, red, green, blue from 0 to 255."""

    @property
    def row(self) -> list[str | float | None]:
        """Of a table with the columns `COLUMNS`."""
        return [self.prompt, self.answer, self.reward, self.advantage]


COLUMNS = ("prompt", "answer", "reward", "advantage")
"""Of a table of samples, without pictures."""


class Tracker(ABC):
    """Receives each step once, in ascending order, also over kills and resumes: it goes on with the same record.

    It is made, called and closed on one thread that is no other's; the run waits for none of it. What it raises is told
    once. Making it and `log` are tried again until they succeed or the run ends, `log_samples` is not.
    """

    package: ClassVar[str | None] = None
    """What must be installed besides Tandem; the extra that brings it is called as the tracker."""
    last_step: int | None = None
    """Set when it is made: the last step of its own record, -1 where that is empty. None: `TrackedRun.last_step` is
    trusted, which may lack what was taken in the moment that the process was killed."""

    @classmethod
    def check(cls, options: Any) -> Iterator[str]:
        """What is wrong with the options or the package, told before the run starts; a server that does not answer is
        not. The package is installed."""
        yield from ()

    @abstractmethod
    def __init__(self, options: Any, run: TrackedRun) -> None:
        """Open the record of `run.id`, or make it."""

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:  # noqa: B027  may have no tables
        """Show answers; `table`: `samples` or `validation_samples`. Comes before the `log` of the step."""

    @abstractmethod
    def log(self, step: int, metrics: StepMetrics) -> None:
        """Keep the metrics of one step; some may be NaN."""

    @abstractmethod
    def close(self, ended: Ended) -> None:
        """Called once, after the last step, unless the process is killed before; `ended` is not `killed`."""
