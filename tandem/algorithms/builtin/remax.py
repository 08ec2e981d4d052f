"""ReMax (Li et al. 2023): the reward of the greedy answer to the same prompt is the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.config.algorithms import PolicyGradientConfig, PolicyLossConfig
from tandem.config.base import PositiveInt, rule

if TYPE_CHECKING:
    from torch import Tensor


class ReMaxConfig(PolicyGradientConfig):
    """The reward of the greedy answer is the baseline (arXiv:2310.10505)."""

    type: Literal["remax"] = "remax"
    group_size: PositiveInt = 1
    loss: PolicyLossConfig = ReinforceLossConfig(aggregation="sequence_mean_token_sum")

    @rule()
    def _punishes_no_length(self) -> Iterator[str]:
        if self.overlong_buffer:
            yield "overlong_buffer: remax compares with the greedy answer, which is not punished for length"


class ReMax(PolicyGradient[ReMaxConfig]):
    """Advantage of every token of a trajectory = reward - reward of the greedy answer (algorithm 1, equation 7).

    0 where the greedy answer has no reward.
    """

    def __init__(self, config: ReMaxConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Need.GREEDY_REWARDS}

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        assert rollouts.greedy_rewards_B is not None
        advantages_B = (rollouts.rewards_B - rollouts.greedy_rewards_B).nan_to_num(0)
        return Advantages(rollouts.by_token(advantages_B), None, {})
