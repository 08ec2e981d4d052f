"""Optimal token baseline (Li et al. 2026): siblings are compared token by token, weighted by what they have moved."""

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts, Signal
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.ppo import gae
from tandem.algorithms.siblings import Siblings
from tandem.config.algorithms import GroupConfig


class OTB(PolicyGradient[GroupConfig]):
    """Advantage of a row's token t = G_t - B_t, with G_t the sum of the rewards from t on and

        B_t = sum(W_t G_t) / sum(W_t)        over the group's rows that have a token t
        W_t = sum over s <= t of (1 - 2 pi_s + sum of pi^2 over the vocabulary at s)

    W is the logit-gradient proxy of the squared gradient norm up to t. t counts trained tokens. A token whose siblings
    have all ended is its own baseline: advantage 0.
    """

    def __init__(self, config: GroupConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Signal.SQUARED_PROBS, Signal.POLICY_LOGPROBS}

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        mask_T, squares_T = rollouts.mask_T, rollouts.squared_probs_T
        assert squares_T is not None and rollouts.policy_logprobs_T is not None
        rows_K = rollouts.rows_T[mask_T]
        _, returns_T = gae(rewards_T, torch.zeros(len(mask_T)), mask_T, rollouts.rows_T, 1.0, 1.0)
        moved_K = 1 - 2 * rollouts.policy_logprobs_T[mask_T].double().exp() + squares_T[mask_T].double()
        lengths_B = torch.bincount(rows_K, minlength=1)
        starts_K = (lengths_B.cumsum(0) - lengths_B)[rows_K]
        time_K = torch.arange(len(rows_K)) - starts_K
        total_K = moved_K.cumsum(0)
        weight_K = total_K - (total_K - moved_K)[starts_K]
        together = Siblings(torch.ones_like(rows_K, dtype=torch.bool), rollouts.groups_B[rows_K] * len(mask_T) + time_K)
        returns_K = returns_T[mask_T].double()
        centred_K = returns_K - together.mean(returns_K)  # equal returns leave exactly 0
        baseline_K = together.mean(weight_K * centred_K) / together.mean(weight_K).clamp(min=1e-8)
        advantages_T = torch.zeros(len(mask_T))
        advantages_T[mask_T] = (centred_K - baseline_K).float()
        return Advantages(advantages_T, None, {})
