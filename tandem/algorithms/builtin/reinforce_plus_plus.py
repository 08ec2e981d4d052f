"""REINFORCE++ (Hu et al. 2025): no critic and no group, the whole step is the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.returns import discounted_returns, masked_whiten
from tandem.config.algorithms import KLConfig, PolicyGradientConfig
from tandem.config.base import PositiveInt, Share

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Rewards with a token-wise KL penalty, whitened over the whole step (arXiv:2501.03262)."""

    advantages_by_token: ClassVar[bool] = True
    takes_turn_rewards: ClassVar[bool] = True

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_size: PositiveInt = 1
    gamma: Share = 1.0
    kl: KLConfig = KLConfig(place="reward", estimator="k1", coefficient=0.01)


class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusConfig]):
    """Discounted sum of a token's and all later rewards, whitened over the tokens of the step (section 3.1).

    The KL penalty is in the rewards of single tokens, so an early token answers for more of it than a late one.
    """

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        returns_T = discounted_returns(rewards_T, rollouts.mask_T, rollouts.branches_T, self.config.gamma)
        return Advantages(masked_whiten(returns_T, rollouts.mask_T), None, {})
