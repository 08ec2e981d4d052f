"""Group Relative Policy Optimization (Shao et al. 2024): the siblings of a prompt are the baseline, no critic."""

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.config.tree import GRPOConfig


class GRPO(PolicyGradient[GRPOConfig]):
    """Advantage of every token of a row = (reward - group mean) / (group standard deviation + 1e-6).

    Equal rewards, or a group of one, give exactly 0. Without `normalize_by_std` only the mean is taken off (Dr. GRPO,
    Liu et al. 2025).
    """

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        scored_B = rollouts.scored_B
        mean_B, std_B = group_statistics(rollouts.rewards_B, scored_B, rollouts.groups_B)
        advantages_B = (rollouts.rewards_B - mean_B) * scored_B
        if self.config.normalize_by_std:
            advantages_B = advantages_B / (std_B + 1e-6)
        equal = std_B[scored_B] == 0
        metrics = {"reward/group_std/zero_share": equal.double().mean().item()} if len(equal) else {}
        return Advantages(advantages_B.float()[rollouts.rows_T] * rollouts.mask_T, None, metrics)


def group_statistics(rewards_B: Tensor, scored_B: Tensor, groups_B: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation) of the scored rewards in each row's group; two float64 `[B]`.

    The deviation is the sample's (n - 1 in the denominator), 0 in a group with fewer than two scored rows.
    """
    group_B = torch.searchsorted(groups_B.sort().values, groups_B)  # one number below B for each group

    def group_sum(values_B: Tensor) -> Tensor:
        return torch.bincount(group_B, values_B * scored_B.double())[group_B]

    count_B = group_sum(torch.ones_like(rewards_B))
    mean_B = group_sum(rewards_B) / count_B.clamp(min=1)
    variance_B = group_sum((rewards_B - mean_B).square()) / (count_B - 1).clamp(min=1)
    return mean_B, variance_B.sqrt()
