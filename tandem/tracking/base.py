"""The seam: metrics of a step -> wherever they are kept or shown."""

from typing import Protocol

from tandem.types import StepMetrics


class Tracker(Protocol):
    """Receives each step once, in ascending order; a resumed run repeats the steps after its checkpoint."""

    def log(self, step: int, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...
