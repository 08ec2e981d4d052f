"""Group Relative Policy Optimization (Shao et al. 2024): the siblings of a prompt are the baseline, no critic."""

from torch import Tensor

from tandem.algorithms.base import Rollouts
from tandem.algorithms.siblings import GroupRelative, Siblings
from tandem.config.algorithms import GRPOConfig


class GRPO(GroupRelative[GRPOConfig]):
    """Advantage of every token of a row = (reward - group mean) / (group standard deviation + 1e-6).

    Equal rewards, or a group of one, give exactly 0. Without `normalize_by_std` only the mean is taken off (Dr. GRPO,
    Liu et al. 2025). Also the advantage of DAPO, GSPO, GMPO, CISPO, SAPO and DPPO, which differ in the loss.
    """

    def compare(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        centred_B = rewards_B - siblings.mean(rewards_B)
        return centred_B / (siblings.std(rewards_B) + 1e-6) if self.config.normalize_by_std else centred_B
