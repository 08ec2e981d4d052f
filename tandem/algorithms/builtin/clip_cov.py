"""The clipped surrogate without few tokens of high covariance of log-prob and advantage (Cui et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.covariance import covariances, mark_tokens, share_of_tokens
from tandem.algorithms.policy_loss import PolicyLoss, Tokens, clipped_surrogate
from tandem.config.algorithms import ClipRangeConfig
from tandem.config.base import Share

if TYPE_CHECKING:
    from torch import Tensor


class ClipCovLossConfig(ClipRangeConfig):
    """Takes tokens of high covariance of log-prob and advantage out of the clipped loss (arXiv:2505.22617)."""

    type: Literal["clip_cov"] = "clip_cov"
    share: Share = 0.0002
    """Share of the step's tokens that is detached, drawn from those within the bounds; at least one token."""
    covariance_low: float = 1.0
    covariance_high: float = 5.0


class ClipCovLoss(PolicyLoss[ClipCovLossConfig]):
    """The clipped surrogate, 0 on a `share` of tokens drawn from those whose covariance is within the bounds."""

    selects_by_logprobs = True

    def select(self, rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
        import torch

        covariance_A = covariances(rollouts, advantages_T)
        within_A = (covariance_A > self.config.covariance_low) & (covariance_A < self.config.covariance_high)
        candidates = within_A.nonzero().squeeze(1)
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(rollouts.seed))
        drawn = candidates[order[: share_of_tokens(self.config.share, covariance_A)]]
        return mark_tokens(rollouts.mask_T, drawn)

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        selected_S = tokens.columns.selected
        assert selected_S is not None
        surrogate_S, clipped_S = clipped_surrogate(self.config, tokens.ratio_S, tokens.advantages_S)
        return surrogate_S * ~selected_S, clipped_S | selected_S
