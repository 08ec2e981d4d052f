"""On-Policy RL with Optimal reward baseline (Hao et al. 2025): longer answers count more in the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class OPOConfig(GroupConfig):
    """The length-weighted mean of the siblings is the baseline (arXiv:2505.23585)."""

    takes_turn_rewards: ClassVar[bool] = True

    type: Literal["opo"] = "opo"
    loss: PolicyLossConfig = ReinforceLossConfig(aggregation="sequence_mean_token_sum")


class OPO(GroupRelative[OPOConfig]):
    """r - sum(length * r) / sum(length), lengths in trained tokens       (Hao et al. 2025, equation 7)."""

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        lengths_B = rollouts.trained_tokens_B.double()
        return rewards_B - siblings.sum(lengths_B * rewards_B) / siblings.sum(lengths_B).clamp(min=1)
