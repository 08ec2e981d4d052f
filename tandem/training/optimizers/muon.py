"""Muon (Jordan et al. 2024): matrices of layers move by their momentum, made orthogonal."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.config.base import PositiveFloat
from tandem.config.optimizer import Decay, OptimizerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn


class MuonConfig(OptimizerConfig):
    """Matrices of layers move by orthogonalized momentum (Jordan et al. 2024), 4 bytes a parameter for AdamW's 8; all
    else by AdamW. Of training.type: fsdp."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 1e-6
    """As long a step as AdamW's of this rate (arXiv:2502.16982)."""
    adamw_lr: PositiveFloat | None = None
    """Of embeddings, output layers, norms and biases. Default: `lr`."""
    momentum: Decay = 0.95
    """The share of the last step's momentum in this one's."""

    moves_embeddings: ClassVar[bool] = False

    @property
    def lr_of_others(self) -> float | None:
        return self.adamw_lr

    def moves(self, model: nn.Module) -> set[nn.Parameter]:
        from tandem.training.optimizers.steps.sharded_muon import hidden_matrices

        return hidden_matrices(model)

    def make(self, masters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        from tandem.training.optimizers.steps.sharded_muon import ShardedMuon

        return ShardedMuon(masters, self.momentum, self.weight_decay)

    def state_bytes(self, learning: int, matrices: int) -> int:
        return 8 * learning - 4 * matrices

    def step_bytes(self, matrix: int, sharded: bool) -> int:
        """A whole matrix on its way to being orthogonal."""
        return (20 if sharded else 16) * matrix
