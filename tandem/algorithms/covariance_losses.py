"""Losses that keep entropy up by holding back few tokens of high covariance (Cui et al. 2025, "The Entropy Mechanism").

Covariance of a token (equation 10): (log pi - mean log pi) * (A - mean A), means over the step's tokens. It is taken
once a step, by the policy before it, so the choice does not depend on how the step is cut.
"""

import torch
from torch import Tensor

from tandem.algorithms.base import Rollouts
from tandem.algorithms.policy_losses import PolicyLoss, Tokens, clipped_surrogate
from tandem.config.algorithms import ClipCovLossConfig, KLCovLossConfig


class KLCovLoss(PolicyLoss[KLCovLossConfig]):
    """-A r, and on the `share` of tokens with the highest covariance + coefficient |log r| (section 4.2)."""

    acts_without_advantage = True
    selects_by_logprobs = True

    def select(self, rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
        covariance_K = covariances(rollouts, advantages_T)
        return _mark(rollouts.mask_T, covariance_K.topk(_count(self.config.share, covariance_K)).indices)

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        selected_S = tokens.columns.selected
        assert selected_S is not None
        penalty_S = self.config.coefficient * tokens.log_ratio_S.abs() * selected_S
        return penalty_S - tokens.advantages_S * tokens.ratio_S, selected_S


class ClipCovLoss(PolicyLoss[ClipCovLossConfig]):
    """The clipped surrogate, 0 on a `share` of tokens drawn from those whose covariance is within the bounds."""

    selects_by_logprobs = True

    def select(self, rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
        covariance_K = covariances(rollouts, advantages_T)
        within = (covariance_K > self.config.covariance_low) & (covariance_K < self.config.covariance_high)
        candidates = within.nonzero().squeeze(1)
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(rollouts.seed))
        return _mark(rollouts.mask_T, candidates[order[: _count(self.config.share, covariance_K)]])

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        selected_S = tokens.columns.selected
        assert selected_S is not None
        surrogate_S, clipped_S = clipped_surrogate(self.config, tokens.ratio_S, tokens.advantages_S)
        return surrogate_S * ~selected_S, clipped_S | selected_S


def covariances(rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
    """The covariance of each trained token, float64 `[K]`."""
    assert rollouts.policy_logprobs_T is not None
    advantages_K = advantages_T[rollouts.mask_T].double()
    logprobs_K = rollouts.policy_logprobs_T[rollouts.mask_T].double()
    return (advantages_K - advantages_K.mean()) * (logprobs_K - logprobs_K.mean())


def _count(share: float, covariance_K: Tensor) -> int:
    return min(max(int(share * len(covariance_K)), 1), len(covariance_K))


def _mark(mask_T: Tensor, chosen: Tensor) -> Tensor:
    marked_T = torch.zeros_like(mask_T)
    marked_T[mask_T.nonzero().squeeze(1)[chosen]] = True
    return marked_T
