"""Trainer and engine share one set of parameters: nothing moves, only the version does."""

from __future__ import annotations

from tandem.errors import EngineError
from tandem.generation.base import GenerationEngine


class SharedWeights:
    """The `WeightSync` of the native engine in the trainer's own process."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    def publish(self, version: int) -> None:
        if version < self._engine.version:
            raise EngineError(f"weights of version {version} published after version {self._engine.version}")
        self._engine.load_weights(version, None)
