"""The seam: metrics of a step -> wherever they are kept or shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tandem.types import StepMetrics


class Tracker(ABC):
    """Receives each step once, in ascending order; a resumed run repeats the steps after its checkpoint.

    One in `tandem/tracking/trackers` is made as `Kind(config, run_dir, first_step)`: its section of `tracking`, the
    directory of the run, and the step after which it starts, which is not 0 in a resumed run.
    """

    package: ClassVar[str | None] = None
    """What must be installed besides Tandem; the extra that brings it is called as the tracker."""

    @abstractmethod
    def log(self, step: int, metrics: StepMetrics) -> None:
        """Keep or show the metrics of one step; it is there when this returns, for the process may be killed."""

    @abstractmethod
    def close(self) -> None:
        """Called once, after the last step."""
