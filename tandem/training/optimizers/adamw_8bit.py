"""AdamW whose moments are 8-bit codes: a quarter of the optimizer's memory, about the same steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.config.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

LARGEST_BLOCK = 256
"""Numbers in a block: the largest divisor of a row's length that is at most this."""
NUMBERS_AT_ONCE = 2**22
"""Whose moments are float32 at a time, where no single row has more."""


class AdamW8bitConfig(OptimizerConfig):
    """Moments are 8-bit codes with a scale a block (arXiv:2110.02861): 2 bytes a parameter for AdamW's 8. Of
    training.type: fsdp."""

    type: Literal["adamw_8bit"] = "adamw_8bit"

    def moves(self, model: nn.Module) -> set[nn.Parameter]:
        from tandem.training.optimizers.steps.blockwise_adamw import block_of

        return {parameter for parameter in model.parameters() if block_of(parameter.shape)}

    def make(self, masters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        from tandem.training.optimizers.steps.blockwise_adamw import BlockwiseAdamW

        return BlockwiseAdamW(masters, self.betas, self.eps, self.weight_decay)

    def state_bytes(self, learning: int, matrices: int) -> int:
        return learning * (2 * LARGEST_BLOCK + 8) // LARGEST_BLOCK

    def step_bytes(self, matrix: int, sharded: bool) -> int:
        """Moments of some rows, and what is computed of them."""
        return 20 * NUMBERS_AT_ONCE
