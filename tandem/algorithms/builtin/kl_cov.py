"""A KL penalty on the tokens of highest covariance of log-prob and advantage (Cui et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.covariance import covariances, mark_tokens, share_of_tokens
from tandem.algorithms.policy_loss import PolicyLoss, Tokens
from tandem.config.algorithms import LossConfig, PolicyGradientConfig
from tandem.config.base import NonNegativeFloat, Share

if TYPE_CHECKING:
    from torch import Tensor


class KLCovLossConfig(LossConfig):
    """A KL penalty on the tokens of highest covariance of log-prob and advantage (arXiv:2505.22617)."""

    type: Literal["kl_cov"] = "kl_cov"
    share: Share = 0.002
    """Share of the step's tokens that gets the KL penalty; at least one token."""
    coefficient: NonNegativeFloat = 1.0

    bounds_ratio: ClassVar[bool] = False

    def find_mistakes(self, algorithm: PolicyGradientConfig) -> Iterator[str]:
        if algorithm.epochs * algorithm.minibatches == 1:
            yield "loss.type: kl_cov does nothing on one optimizer step a batch; raise minibatches or epochs"


class KLCovLoss(PolicyLoss[KLCovLossConfig]):
    """-A r, and on the `share` of tokens with the highest covariance + coefficient |log r| (section 4.2)."""

    acts_without_advantage = True
    selects_by_logprobs = True

    def select(self, rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
        covariance_A = covariances(rollouts, advantages_T)
        highest = covariance_A.topk(share_of_tokens(self.config.share, covariance_A)).indices
        return mark_tokens(rollouts.mask_T, highest)

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        selected_S = tokens.columns.selected
        assert selected_S is not None
        penalty_S = self.config.coefficient * tokens.log_ratio_S.abs() * selected_S
        return penalty_S - tokens.advantages_S * tokens.ratio_S, selected_S
