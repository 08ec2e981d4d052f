"""Proximal Policy Optimization (Schulman et al. 2017): a critic's values are the baseline of every token."""

from __future__ import annotations

import torch

from tandem.algorithms.advantage import gae, masked_whiten
from tandem.algorithms.base import Advantages, Rollouts, Signal
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.value_loss import ValueLoss, explained_variance
from tandem.config.tree import PPOConfig


class PPO(PolicyGradient):
    """Generalised advantage estimation, whitened over the tokens of the step; the critic learns the returns."""

    def __init__(self, config: PPOConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self._gamma, self._gae_lambda = config.gamma, config.gae_lambda
        self._whiten = config.whiten_advantages
        self.needs |= {Signal.VALUES}
        self.value_loss = ValueLoss(config.value_clip)

    def estimate(self, rollouts: Rollouts, rewards_T: torch.Tensor) -> Advantages:
        values_T, mask_T = rollouts.values_T, rollouts.mask_T
        assert values_T is not None
        advantages_T, returns_T = gae(
            rewards_T, values_T, mask_T, rollouts.rows_T, gamma=self._gamma, gae_lambda=self._gae_lambda
        )
        metrics: dict[str, float] = {}
        explained = explained_variance(values_T, returns_T, mask_T)
        if explained is not None:
            metrics["critic/vf_explained_var"] = explained
        if self._whiten:
            advantages_T = masked_whiten(advantages_T, mask_T)
        return Advantages(advantages_T, returns_T, metrics)
