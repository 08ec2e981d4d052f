"""Group Relative Policy Optimization (Shao et al. 2024): the siblings of a prompt are the baseline, no critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig
from tandem.config.base import rule

if TYPE_CHECKING:
    from torch import Tensor


class GRPOFamilyConfig(GroupConfig):
    """What GRPO and its kin share."""

    takes_turn_rewards: ClassVar[bool] = True

    normalize_by_std: bool = True
    """Divide the group's centred rewards by their standard deviation."""

    @rule()
    def _turns_have_no_deviation(self) -> Iterator[str]:
        if self.turn_rewards == "by_turn" and self.normalize_by_std:
            yield (
                "turn_rewards: by_turn: the deviation of whole rewards is no scale for those of turns, and is 0 where "
                "turns alone differ; give normalize_by_std: false"
            )


class GRPOConfig(GRPOFamilyConfig):
    """Group Relative Policy Optimization (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"


class GRPO(GroupRelative[GRPOFamilyConfig]):
    """Advantage of every token of a trajectory = (reward - group mean) / (group standard deviation + 1e-6).

    Equal rewards, or a group of one, give exactly 0. Without `normalize_by_std` only the mean is taken off.
    """

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        centred_B = rewards_B - siblings.mean(rewards_B)
        return centred_B / (siblings.std(rewards_B) + 1e-6) if self.config.normalize_by_std else centred_B
