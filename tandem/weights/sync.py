"""The seam: trained weights -> served weights."""

from typing import Protocol

from tandem.errors import EngineError
from tandem.generation.base import GenerationEngine


class WeightSync(Protocol):
    """Carries the trainer's weights into the generation engine."""

    def publish(self, version: int) -> None:
        """Make the engine serve the trainer's present weights as `version`, larger than every version before."""
        ...


class SharedWeights:
    """Trainer and engine have one set of parameters: nothing moves, only the version does."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._version = -1

    def publish(self, version: int) -> None:
        if version <= self._version:
            raise EngineError(f"weights of version {version} published after version {self._version}")
        self._version = version
        self._engine.load_weights(version, None)
