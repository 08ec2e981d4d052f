"""The critic's loss and how well it predicts. `_S` scored tokens of a micro-batch, `_T` tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.types import Outputs, TokenColumns


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared error to the returns, where moving away from the old value does not pay (PPO2's value clipping).

        clipped = old + clip(value - old, -value_clip, value_clip)
        term = max((value - return)^2, (clipped - return)^2) / 2

    Columns: `values` (the old ones), `returns`, `weights` and `shares`.
    """

    value_clip: float | None

    token_local = True
    entropy_gradient = False

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values_S, old_S, returns_S = outputs.values_S, columns.values, columns.returns
        weights_S, shares_S = columns.weights, columns.shares
        assert values_S is not None and old_S is not None and returns_S is not None
        assert weights_S is not None and shares_S is not None
        squares_S = (values_S - returns_S).square()
        metrics = {"critic/value/mean": (shares_S * values_S.detach()).sum()}
        if self.value_clip is not None:
            clipped_S = old_S + (values_S - old_S).clamp(-self.value_clip, self.value_clip)
            clipped_squares_S = (clipped_S - returns_S).square()
            metrics["critic/vf_clip_fraction"] = (shares_S * (clipped_squares_S > squares_S)).sum()
            squares_S = torch.maximum(squares_S, clipped_squares_S)
        loss = (weights_S * squares_S).sum() / 2
        return loss, {**metrics, "critic/vf_loss": loss.detach()}


def explained_variance(values_T: torch.Tensor, returns_T: torch.Tensor, mask_T: torch.Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 perfect, 0 no better than a constant; below: worse.

    None where the returns do not vary, and there is nothing to explain.
    """
    returns, values = returns_T[mask_T].double(), values_T[mask_T].double()
    variance = returns.var(correction=0) if len(returns) else returns.new_zeros(())
    return None if variance == 0 else 1 - ((returns - values).var(correction=0) / variance).item()
