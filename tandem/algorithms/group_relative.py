"""Algorithms that compare the siblings of a prompt: one advantage a trajectory, no critic."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.reward_shaping import earned_so_far
from tandem.config.algorithms import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

Config = TypeVar("Config", bound=PolicyGradientConfig)


class Siblings:
    """Statistics within each trajectory's group, over the scored trajectories only; all float64 `[B]`."""

    def __init__(self, scored_B: Tensor, groups_B: Tensor) -> None:
        import torch

        self._group_B = torch.searchsorted(groups_B.sort().values, groups_B)  # one number below B for each group
        self._scored_B = scored_B.double()
        self.count_B = self.sum(self._scored_B)

    def sum(self, values_B: Tensor) -> Tensor:
        return self._group_B.bincount(values_B * self._scored_B)[self._group_B]

    def mean(self, values_B: Tensor) -> Tensor:
        return self.sum(values_B) / self.count_B.clamp(min=1)

    def std(self, values_B: Tensor) -> Tensor:
        """The sample's (n - 1 in the denominator); 0 where fewer than two trajectories are scored."""
        return (self.sum((values_B - self.mean(values_B)).square()) / (self.count_B - 1).clamp(min=1)).sqrt()


class GroupRelative(PolicyGradient[Config]):
    """A subclass implements `trajectory_advantages`. A trajectory whose siblings all lost their reward gets 0: it has
    no baseline.

    With `turn_rewards: by_turn` the advantage of a turn is its trajectory's less what earlier turns have earned: the
    return from the turn on, with the baseline of the whole trajectory (docs/decisions/0008-rewards-of-turns.md).
    """

    @abstractmethod
    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        """The advantage of each trajectory, float64; `rewards_B` are the shaped ones, float64."""

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        scored_B, rewards_B = rollouts.scored_B, rollouts.rewards_B.double()
        siblings = Siblings(scored_B, rollouts.groups_B)
        advantages_B = self.trajectory_advantages(rewards_B, siblings, rollouts) * (siblings.count_B > 1)
        advantages_T = rollouts.by_token(advantages_B)
        if self.config.turn_rewards == "by_turn" and rollouts.turn_rewards_T is not None:
            compared_T = rollouts.by_token((siblings.count_B > 1).double())
            earned_T = earned_so_far(rollouts.turn_rewards_T, rollouts.mask_T, rollouts.trajectories_T)
            advantages_T = (advantages_T - compared_T * (earned_T - rollouts.turn_rewards_T)).float()
        equal = siblings.std(rewards_B)[scored_B] == 0
        metrics = {"reward/group_std/zero_share": equal.double().mean().item()} if len(equal) else {}
        return Advantages(advantages_T, None, metrics)
