"""How long everything takes in a simulated run."""

from dataclasses import dataclass

from tandem.config.tree import TrainConfig
from tandem.simulation.lengths import Lengths

DEFAULT_MAX_RUNNING = 256
"""Samples that an engine in a process of its own decodes at once."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What an engine's time goes to; seconds."""

    iteration_s: float
    """An iteration: reading the weights, launching kernels."""
    row_s: float = 0.0
    """More for each row."""
    context_token_s: float = 0.0
    """More for each token of context of any row: reading keys and values."""
    prefill_token_s: float = 0.0
    """A token of a new prompt, or of a context whose keys and values were given up."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How long everything takes."""

    engine: EngineSpeed
    train_step_s: float = 0.0
    """A training step, whatever it holds: from the groups to the new weights."""
    train_token_s: float = 0.0
    """More for each token of prompt and response."""
    publish_s: float = 0.0
    pause_s: float = 0.0
    """Putting engines to sleep, and the same for waking them, where they share devices with models."""
    reward_s: float = 0.0
    """From a complete group to its scores."""
    controller_s: float = 0.0
    """The controller by itself, each step: records of trajectories and metrics."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The run that speeds are of."""

    config: TrainConfig
    setup: "Setup"
    """Its speeds and lengths, without any option."""
    step_s: float
    """How long its steps took, the median."""
    rows: int
    """The most rows that one of its engines may have decoded side by side."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    speeds: Speeds
    lengths: Lengths
    max_running: int = DEFAULT_MAX_RUNNING
    """Of an engine in a process of its own."""
    source: str = "the command line"
    """Where the speeds come from, in words."""
    recorded: Recorded | None = None
