"""GDPO (Liu et al. 2026): several rewards, each normalised within its group before they are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tandem.algorithms.base import Need, Rollouts
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.config.algorithms import GroupConfig, find_shaped_rewards
from tandem.config.base import rule
from tandem.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class GDPOConfig(GroupConfig):
    """Several rewards, each normalised apart within its group (arXiv:2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    rewards: dict[str, float] = Field(min_length=1)
    """Weights of parts: names of reward functions, where there are several, or keys that they return."""

    @rule()
    def _needs_raw_rewards(self) -> Iterator[str]:
        yield from find_shaped_rewards(self, "reads the parts of the reward")


class GDPO(GroupRelative[GDPOConfig]):
    """a / (deviation of a over the step + 1e-6), a = sum over parts k of weight_k (r_k - mean) / (deviation + 1e-6).

    Mean and deviation in a are the group's (Liu et al. 2026, equations 4 to 6). The paper also takes off the mean of a
    over the step, which is 0 already. Deviations are the sample's (n - 1).
    """

    def __init__(self, config: GDPOConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Need.REWARD_PARTS}

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        total_B = rewards_B.new_zeros(len(rewards_B))
        for name, weight in self.config.rewards.items():
            part_B = _part(rollouts, name)
            total_B = total_B + weight * (part_B - siblings.mean(part_B)) / (siblings.std(part_B) + 1e-6)
        scored = total_B[rollouts.scored_B]
        return total_B / (scored.std() + 1e-6) if len(scored) > 1 else total_B


def _part(rollouts: Rollouts, name: str) -> Tensor:
    """The part of each scored trajectory's reward, 0 elsewhere."""
    part_B = rollouts.parts.get(name)
    if not rollouts.scored_B.any():
        return rollouts.rewards_B.new_zeros(len(rollouts.rewards_B)).double()
    if part_B is None or part_B[rollouts.scored_B].isnan().any():
        raise UserError(
            f"algorithm.rewards: {name!r} is not a part of every trajectory's reward; parts are "
            f"{', '.join(rollouts.parts) or 'none'}. Name what the reward functions return for each"
        )
    return part_B.double().nan_to_num()
