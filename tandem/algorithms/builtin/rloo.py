"""REINFORCE leave-one-out (Ahmadian et al. 2024): the mean of a prompt's other answers is the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class RLOOConfig(GroupConfig):
    """The mean of the other siblings is the baseline (arXiv:2402.14740)."""

    takes_turn_rewards: ClassVar[bool] = True

    type: Literal["rloo"] = "rloo"
    loss: PolicyLossConfig = ReinforceLossConfig(aggregation="sequence_mean_token_sum")


class RLOO(GroupRelative[RLOOConfig]):
    """r - mean of the other trajectories = n / (n - 1) * (r - mean r)       (Ahmadian et al. 2024, section 2.2)."""

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        count_B = siblings.count_B
        return (rewards_B - siblings.mean(rewards_B)) * count_B / (count_B - 1).clamp(min=1)
