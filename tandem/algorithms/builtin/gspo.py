"""Group Sequence Policy Optimization (Zheng et al. 2025): the ratio of whole responses is clipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens, bounded_exp, clipped_surrogate, trajectory_mean
from tandem.config.algorithms import Aggregation, ClipRangeConfig, PolicyLossConfig
from tandem.config.base import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class GSPOLossConfig(ClipRangeConfig):
    """Clipped ratio of whole sequences, the geometric mean of their tokens' (arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_ratio_low: PositiveFloat = 3e-4
    clip_ratio_high: PositiveFloat = 4e-4
    aggregation: Aggregation = "sequence_mean_token_mean"


class GSPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, with the clipped ratio of whole sequences (arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    loss: PolicyLossConfig = GSPOLossConfig()


class GSPO(GRPO):
    """The advantage of GRPO."""


class GSPOLoss(PolicyLoss[GSPOLossConfig]):
    """max(-A s, -A clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high)) with s = [r_seq] pi / [pi] (Zheng et al. 2025).

    r_seq = (product of the tokens' ratios) ** (1 / number of tokens). This is the token form (equations 13 and 14).
    Where a trajectory has one advantage, its value and gradient are those of the sequence form (equation 5).
    """

    token_local = False

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        log_ratio_S = trajectory_mean(tokens.log_ratio_S.detach(), tokens)
        ratio_S = bounded_exp(log_ratio_S + tokens.logprobs_S - tokens.logprobs_S.detach())
        return clipped_surrogate(self.config, ratio_S, tokens.advantages_S)
