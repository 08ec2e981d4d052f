"""Group baselines other than the plain mean; r is a row's reward, means run over its group's n scored rows."""

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.ppo import masked_whiten
from tandem.algorithms.siblings import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig
from tandem.errors import UserError


class RLOO(GroupRelative[GroupConfig]):
    """r - mean of the other rows = n / (n - 1) * (r - mean r)       (Ahmadian et al. 2024, section 2.2)."""

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        count_B = siblings.count_B
        return (rewards_B - siblings.mean(rewards_B)) * count_B / (count_B - 1).clamp(min=1)


class OPO(GroupRelative[GroupConfig]):
    """r - sum(length * r) / sum(length), lengths in trained tokens       (Hao et al. 2025, equation 7)."""

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        lengths_B = torch.bincount(rollouts.rows_T[rollouts.mask_T], minlength=len(rewards_B)).double()
        return rewards_B - siblings.sum(lengths_B * rewards_B) / siblings.sum(lengths_B).clamp(min=1)


class GPG(GroupRelative[GroupConfig]):
    """alpha * (r - mean r), alpha = rows / rows in groups whose rewards differ       (Chu et al. 2025, section 3)."""

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        scored_B = rollouts.scored_B
        informative = int((siblings.std(rewards_B)[scored_B] > 0).sum())
        return (rewards_B - siblings.mean(rewards_B)) * int(scored_B.sum()) / max(informative, 1)


class MaxRL(GroupRelative[GroupConfig]):
    """(r - mean r) / mean r, 0 where the mean is 0       (Tajwar et al. 2026, algorithm 1).

    In expectation over groups of n this is the gradient of log(pass rate), expanded to order n.
    """

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        if (rewards_B < 0).any():
            raise UserError(f"algorithm maxrl: a reward is {rewards_B.min().item():g}; it needs rewards of 0 or more")
        mean_B = siblings.mean(rewards_B)
        return (rewards_B - mean_B) / mean_B.masked_fill(mean_B == 0, 1)


class ReinforcePlusPlusBaseline(GroupRelative[GroupConfig]):
    """r - mean r, then mean 0 and deviation 1 over the tokens of the step       (Hu et al. 2025, section 3.2)."""

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        return rewards_B - siblings.mean(rewards_B)

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        found = super().estimate(rollouts, rewards_T)
        found.advantages_T = masked_whiten(found.advantages_T, rollouts.mask_T)
        return found
