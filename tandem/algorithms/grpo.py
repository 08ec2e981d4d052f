"""Group Relative Policy Optimization (Shao et al. 2024): the siblings of a prompt are the baseline, no critic."""

from __future__ import annotations

import torch

from tandem.algorithms.advantage import group_statistics
from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.config.tree import GRPOConfig


class GRPO(PolicyGradient):
    """Advantage of every token of a row = (reward - group mean) / (group standard deviation + 1e-6).

    Mean and deviation (n - 1 in the denominator) are over the scored siblings. Equal rewards, or a group of one, give
    exactly 0. Without `normalize_by_std` only the mean is taken off (Dr. GRPO, Liu et al. 2025).
    """

    def __init__(self, config: GRPOConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self._normalize_by_std = config.normalize_by_std

    def estimate(self, rollouts: Rollouts, rewards_T: torch.Tensor) -> Advantages:
        scored_B = rollouts.scored_B
        mean_B, std_B = group_statistics(rollouts.rewards_B, scored_B, rollouts.groups_B)
        advantages_B = (rollouts.rewards_B - mean_B) * scored_B
        if self._normalize_by_std:
            advantages_B = advantages_B / (std_B + 1e-6)
        advantages_T = advantages_B.float()[rollouts.rows_T] * rollouts.mask_T
        metrics: dict[str, float] = {}
        if scored_B.any():
            metrics["reward/group_std/mean"] = std_B[scored_B].mean().item()
            metrics["reward/group_std/zero_share"] = (std_B[scored_B] == 0).double().mean().item()
        return Advantages(advantages_T, None, metrics)
