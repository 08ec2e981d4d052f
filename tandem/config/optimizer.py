"""The sections `training.optimizer` and `algorithm.critic_optimizer`: how gradients move weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from tandem.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section, Share
from tandem.config.sections import FoundIn, of_usual_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

Decay = Annotated[Share, Field(lt=1)]
"""What stays of a mean each step; of 1 nothing new would come in."""


class OptimizerConfig(Section):
    """How gradients move float32 masters, and a learning-rate schedule over the optimizer steps of the run.

    The types are in tandem/training/optimizers, one a file. Torch's AdamW moves what an optimizer leaves.
    """

    type: Any
    lr: PositiveFloat = 1e-6
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From `lr` after the warm-up to `lr * min_lr_ratio`, which the step after the last would have."""
    min_lr_ratio: Share = 0.0
    warmup_steps: NonNegativeInt = 0

    moves_embeddings: ClassVar[bool] = True
    """False where it leaves the masters of embeddings to AdamW, whose steps take no `step_bytes`."""

    @property
    def lr_of_others(self) -> float | None:
        """The rate at which AdamW moves what this optimizer leaves, where that of this one is `lr`; None: the same."""
        return None

    def moves(self, model: nn.Module) -> set[nn.Parameter]:
        """The model's parameters whose masters it moves."""
        return set()

    def make(self, masters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """What moves them; none is empty. Its one group's `lr` is set before each step, which passes masters without
        gradient by. From the beginning it has in `state` all that it keeps: tensors, those of a master's size sharded
        as that is."""
        raise NotImplementedError

    def state_bytes(self, learning: int, matrices: int) -> int:
        """What is kept of `learning` parameters besides masters, AdamW's part included; `matrices` of them are in
        matrices of layers. `tests/unit/test_planning_trace.py` compares it with the real engine."""
        return 8 * learning

    def step_bytes(self, matrix: int, sharded: bool) -> int:
        """What a step makes and forgets on a rank; `matrix`: parameters in the largest matrix of a layer."""
        return 0


AnyOptimizerConfig = Annotated[OptimizerConfig, FoundIn("tandem.training.optimizers"), of_usual_type("adamw")]
"""The optimizer of any type."""
