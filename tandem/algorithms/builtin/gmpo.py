"""Geometric-Mean Policy Optimization (Zhao et al. 2025): outliers among a response's ratios hardly move its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens, bounded_exp, row_mean
from tandem.config.algorithms import Aggregation, LossConfig, PolicyGradientConfig, PolicyLossConfig
from tandem.config.base import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class GMPOLossConfig(LossConfig):
    """Geometric mean of the tokens' clipped ratios (arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    clip_log_ratio: PositiveFloat = 0.4
    """Token ratios count within exp(-this) … exp(this)."""
    aggregation: Aggregation = "sequence_mean_token_mean"

    def check(self, algorithm: PolicyGradientConfig) -> None:
        if algorithm.advantages_by_token:
            raise ValueError(f"loss.type: gmpo weighs whole responses, but {algorithm.type} judges tokens; use gspo")


class GMPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, with the geometric mean of the tokens' clipped ratios (arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    loss: PolicyLossConfig = GMPOLossConfig()


class GMPO(GRPO):
    """The advantage of GRPO."""


class GMPOLoss(PolicyLoss[GMPOLossConfig]):
    """-A exp(row mean of log r), log r cut at ± clip_log_ratio where A pushes it further out (Zhao et al. 2025).

    A row must have one advantage.
    """

    token_local = False

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        sign_S = tokens.advantages_S.sign()
        log_ratio_S = sign_S * (sign_S * tokens.log_ratio_S).clamp(max=self.config.clip_log_ratio)
        clipped_S = sign_S * tokens.log_ratio_S > self.config.clip_log_ratio
        return -tokens.advantages_S * bounded_exp(row_mean(log_ratio_S, tokens)), clipped_S
