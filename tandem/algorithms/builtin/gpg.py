"""Group Policy Gradient (Chu et al. 2025): scaled up for the groups that have no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class GPGConfig(GroupConfig):
    """The siblings' mean is the baseline; scaled up for groups whose rewards are all equal (arXiv:2504.02546)."""

    type: Literal["gpg"] = "gpg"
    loss: PolicyLossConfig = ReinforceLossConfig()


class GPG(GroupRelative[GPGConfig]):
    """alpha * (r - mean r), alpha = trajectories / those in groups whose rewards differ (Chu et al. 2025, sec. 3)."""

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        scored_B = rollouts.scored_B
        informative = int((siblings.std(rewards_B)[scored_B] > 0).sum())
        return (rewards_B - siblings.mean(rewards_B)) * int(scored_B.sum()) / max(informative, 1)
