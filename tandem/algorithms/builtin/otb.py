"""Optimal token baseline (Li et al. 2026): siblings are compared token by token, weighted by what they have moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.builtin.reinforce import ReinforceLossConfig
from tandem.algorithms.group_relative import Siblings
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.returns import discounted_returns, places_in_rows
from tandem.config.algorithms import GroupConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class OTBConfig(GroupConfig):
    """The siblings' weighted mean at each token is the baseline (arXiv:2602.07078)."""

    advantages_by_token: ClassVar[bool] = True

    type: Literal["otb"] = "otb"
    loss: PolicyLossConfig = ReinforceLossConfig(aggregation="sequence_mean_token_sum")

    @property
    def needs_trainer_logprobs(self) -> bool:
        return True


class OTB(PolicyGradient[OTBConfig]):
    """Advantage of a trajectory's token t = G_t - B_t, with G_t the sum of the rewards from t on and

        B_t = sum(W_t G_t) / sum(W_t)        over the group's trajectories that have a token t
        W_t = sum over s <= t of (1 - 2 pi_s + sum of pi^2 over the vocabulary at s)

    W is the logit-gradient proxy of the squared gradient norm up to t. t counts the trained tokens of a trajectory,
    branch after branch. A token whose siblings have all ended is its own baseline: advantage 0.
    """

    def __init__(self, config: OTBConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Need.SQUARED_PROBS, Need.OLD_LOGPROBS}

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        mask_T, trajectories_A = rollouts.mask_T, rollouts.trajectories_T[rollouts.mask_T]
        returns_A = discounted_returns(rewards_T, mask_T, rollouts.branches_T, gamma=1.0)[mask_T].double()
        weight_A = self._moved_so_far(rollouts)
        same_place = rollouts.groups_B[trajectories_A] * len(mask_T) + places_in_rows(trajectories_A)
        at_token = Siblings(mask_T[mask_T], same_place)
        centred_A = returns_A - at_token.mean(returns_A)  # equal returns leave exactly 0
        baseline_A = at_token.mean(weight_A * centred_A) / at_token.mean(weight_A).clamp(min=1e-8)
        advantages_T = rewards_T.new_zeros(len(mask_T))
        advantages_T[mask_T] = (centred_A - baseline_A).float()
        return Advantages(advantages_T, None, {})

    def _moved_so_far(self, rollouts: Rollouts) -> Tensor:
        """W of each trained token, float64 `[A]`."""
        assert rollouts.old_logprobs_T is not None and rollouts.squared_probs_T is not None
        mask_T, trajectories_A = rollouts.mask_T, rollouts.trajectories_T[rollouts.mask_T]
        probs_A = rollouts.old_logprobs_T[mask_T].double().exp()
        moved_A = 1 - 2 * probs_A + rollouts.squared_probs_T[mask_T].double()
        total_A = moved_A.cumsum(0)
        before_A = total_A - moved_A
        lengths_B = trajectories_A.bincount(minlength=1)
        starts_A = (lengths_B.cumsum(0) - lengths_B)[trajectories_A]
        return total_A - before_A[starts_A]
