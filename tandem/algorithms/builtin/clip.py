"""The clipped surrogate of PPO (Schulman et al. 2017), each side with a bound of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tandem.algorithms.policy_loss import PolicyLoss, Tokens, clipped_surrogate
from tandem.config.algorithms import ClipRangeConfig

if TYPE_CHECKING:
    from torch import Tensor


class ClipLossConfig(ClipRangeConfig):
    """Clipped surrogate (PPO, arXiv:1707.06347), each side with a bound of its own (DAPO, arXiv:2503.14476)."""

    type: Literal["clip"] = "clip"
    dual_clip: float | None = Field(default=None, gt=1)
    """Lower bound of the objective at negative advantages, in units of the advantage (arXiv:1912.09729)."""


class ClipLoss(PolicyLoss[ClipLossConfig]):
    """Clipped surrogate (Schulman et al. 2017, equation 7) with asymmetric bounds (DAPO, Yu et al. 2025).

    max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)); with dual clip and A < 0 at most -A dual_clip
    (Ye et al. 2020, equation 5).
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        surrogate_S, clipped_S = clipped_surrogate(self.config, tokens.ratio_S, tokens.advantages_S)
        if self.config.dual_clip is not None:
            bound_S = -tokens.advantages_S * self.config.dual_clip
            surrogate_S = surrogate_S.minimum(bound_S).where(tokens.advantages_S < 0, surrogate_S)
        return surrogate_S, clipped_S
