"""REINFORCE++ (Hu et al. 2025): no critic and no group, the whole step is the baseline."""

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.ppo import gae, masked_whiten
from tandem.config.algorithms import ReinforcePlusPlusConfig


class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusConfig]):
    """Discounted sum of a token's and all later rewards, whitened over the tokens of the step (section 3.1).

    The KL penalty is in the rewards of single tokens, so an early token answers for more of it than a late one.
    """

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        mask_T = rollouts.mask_T
        no_values_T = torch.zeros(len(mask_T))
        _, returns_T = gae(rewards_T, no_values_T, mask_T, rollouts.rows_T, self.config.gamma, gae_lambda=1.0)
        return Advantages(masked_whiten(returns_T, mask_T), None, {})
