"""CISPO (MiniMax-M1, 2025): the ratio is clipped as a weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens
from tandem.config.algorithms import ClipRangeConfig, PolicyLossConfig
from tandem.config.base import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class CISPOLossConfig(ClipRangeConfig):
    """Log-likelihood weighted by the clipped ratio, which has no gradient (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_ratio_low: PositiveFloat = 1.0
    """1: no lower bound."""
    clip_ratio_high: PositiveFloat = 4.0


class CISPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, with the log-likelihood weighted by the clipped ratio (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    loss: PolicyLossConfig = CISPOLossConfig()


class CISPO(GRPO):
    """The advantage of GRPO."""


class CISPOLoss(PolicyLoss[CISPOLossConfig]):
    """-[clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)] A log pi (MiniMax-M1, 2025, equations 4 and 5)."""

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio_S = tokens.ratio_S.detach()
        weight_S = ratio_S.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)
        return -weight_S * tokens.advantages_S * tokens.logprobs_S, weight_S != ratio_S
