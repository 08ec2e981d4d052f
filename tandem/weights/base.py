"""The seam: trained weights -> served weights."""

from typing import Protocol


class WeightSync(Protocol):
    """Carries the trainer's weights into the generation engine."""

    def publish(self, version: int) -> None:
        """Make the engine serve the trainer's present weights as `version`, larger than every version before."""
        ...
