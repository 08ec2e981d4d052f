"""The section `training`: the engine that trains, and how the model lies on the ranks."""

from typing import Literal

from tandem.config.algorithms import OptimizerConfig
from tandem.config.base import PositiveInt, Section


class TrainingSection(Section):
    """What every engine has."""

    optimizer: OptimizerConfig = OptimizerConfig()
    tokens_per_micro_batch: PositiveInt = 16_384
    """Of one forward and backward pass, a prompt counted once for its siblings; a longer row is passed alone."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    skip_zero_advantage: bool = True
    """Leave out rows whose gradient is exactly zero; the loss is normalised as if they were there."""


class FsdpTrainingConfig(TrainingSection):
    """The PyTorch engine: plain torch on one rank, FSDP2 on several."""

    type: Literal["fsdp"] = "fsdp"
    shard_size: PositiveInt | None = None
    """Ranks that share one copy of the model; the others hold replicas. Default: all share one."""
    cpu_offload: bool = False
    """Keep the optimizer, and on several ranks the shards, in host memory; the optimizer runs there."""
    reduce_once: bool = True
    """Sum gradients over ranks once a pass. False: after each micro-batch, so that no rank holds a full gradient."""


TrainingConfig = FsdpTrainingConfig
