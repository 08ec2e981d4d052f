"""Trainer and engine share one set of parameters: nothing moves, only the version does."""

from tandem.errors import EngineError
from tandem.generation.base import GenerationEngine


class SharedWeights:
    """The `WeightSync` of the native engine in the trainer's own process."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._version = -1

    def publish(self, version: int) -> None:
        if version <= self._version:
            raise EngineError(f"weights of version {version} published after version {self._version}")
        self._version = version
        self._engine.load_weights(version, None)
