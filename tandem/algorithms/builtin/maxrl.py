"""MaxRL (Tajwar et al. 2026): towards the gradient of log(pass rate), so that hard prompts count more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig, PolicyLossConfig, find_shaped_rewards
from tandem.config.base import rule
from tandem.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class MaxRLConfig(GroupConfig):
    """In units of the mean reward of the siblings (arXiv:2602.02710)."""

    type: Literal["maxrl"] = "maxrl"
    loss: PolicyLossConfig = ReinforceLossConfig()

    @rule()
    def _needs_raw_rewards(self) -> Iterator[str]:
        yield from find_shaped_rewards(self, "divides by the mean reward")


class MaxRL(GroupRelative[MaxRLConfig]):
    """(r - mean r) / mean r, 0 where the mean is 0       (Tajwar et al. 2026, algorithm 1).

    In expectation over groups of n this is the gradient of log(pass rate), expanded to order n.
    """

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        if (rewards_B < 0).any():
            raise UserError(f"algorithm maxrl: a reward is {rewards_B.min().item():g}; it needs rewards of 0 or more")
        mean_B = siblings.mean(rewards_B)
        return (rewards_B - mean_B) / mean_B.masked_fill(mean_B == 0, 1)
