"""Geometric-Mean Policy Optimization (Zhao et al. 2025): outliers among a response's ratios hardly move its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens, bounded_exp, trajectory_mean
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

    def find_mistakes(self, algorithm: PolicyGradientConfig) -> Iterator[str]:
        judges = "turns" if algorithm.turn_rewards == "by_turn" else "tokens"
        if algorithm.advantages_by_token or judges == "turns":
            yield f"loss.type: gmpo weighs whole responses, but {algorithm.type} judges {judges}; use gspo"


class GMPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, with the geometric mean of the tokens' clipped ratios (arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    loss: PolicyLossConfig = GMPOLossConfig()


class GMPO(GRPO):
    """The advantage of GRPO."""


class GMPOLoss(PolicyLoss[GMPOLossConfig]):
    """-A (product over the trajectory's n tokens of c(r_t)) ** (1 / n) = -A exp(mean of log c(r)) (Zhao et al. 2025).

    c cuts log r at ± clip_log_ratio where A pushes it further out. A trajectory must have one advantage.

    Rollout correction: the tokens were drawn by the generation engine's policy mu, so the ratio of a token is
    pi / mu = r w, with w = old policy / mu its importance weight, truncated or masked. It stands where r stands, in the
    product:

        -A (product over kept tokens of c(r_t) w_t) ** (1 / number of kept tokens)        kept: w_t > 0

    which is the trajectory's loss times the geometric mean of its weights. A masked token (w = 0) leaves the product,
    or none would be left of it, and its term is 0, as in every other loss.
    """

    token_local = False

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        sign_S = tokens.advantages_S.sign()
        clipped_S = sign_S * tokens.log_ratio_S > self.config.clip_log_ratio
        return -tokens.advantages_S * bounded_exp(trajectory_mean(self._cut_log_ratio(tokens), tokens)), clipped_S

    def corrected(self, surrogate_S: Tensor, importance_weights_S: Tensor, tokens: Tokens) -> Tensor:
        kept_S = (importance_weights_S > 0).to(importance_weights_S.dtype)
        log_weight_S = importance_weights_S.where(kept_S > 0, 1.0).log()
        share_kept_S = trajectory_mean(kept_S, tokens).where(kept_S > 0, 1.0)
        log_product_S = trajectory_mean((self._cut_log_ratio(tokens) + log_weight_S) * kept_S, tokens)
        return -tokens.advantages_S * bounded_exp(log_product_S / share_kept_S) * kept_S

    def _cut_log_ratio(self, tokens: Tokens) -> Tensor:
        """log c(r), `[S]`."""
        sign_S = tokens.advantages_S.sign()
        return sign_S * (sign_S * tokens.log_ratio_S).clamp(max=self.config.clip_log_ratio)
