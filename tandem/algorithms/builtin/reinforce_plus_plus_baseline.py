"""REINFORCE++ with baseline (Hu et al. 2025): the siblings' mean is the baseline, the whole step the scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Advantages, Rollouts
from tandem.algorithms.group_relative import GroupRelative, Siblings
from tandem.algorithms.returns import masked_whiten
from tandem.config.algorithms import GroupConfig, KLConfig

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusBaselineConfig(GroupConfig):
    """The siblings' mean is the baseline, whitened over the step (arXiv:2501.03262)."""

    takes_turn_rewards: ClassVar[bool] = True

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    kl: KLConfig = KLConfig(place="loss", estimator="k2", coefficient=0.01)


class ReinforcePlusPlusBaseline(GroupRelative[ReinforcePlusPlusBaselineConfig]):
    """r - mean r, then mean 0 and deviation 1 over the tokens of the step       (Hu et al. 2025, section 3.2)."""

    def trajectory_advantages(self, rewards_B: Tensor, siblings: Siblings, rollouts: Rollouts) -> Tensor:
        return rewards_B - siblings.mean(rewards_B)

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        result = super().estimate(rollouts, rewards_T)
        result.advantages_T = masked_whiten(result.advantages_T, rollouts.mask_T)
        return result
