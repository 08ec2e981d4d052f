"""What policy-gradient algorithms share: a new one is a subclass that says how rewards become advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.kl import kl_estimate
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.reward_shaping import (
    RunningMoments,
    earned_so_far,
    longest_branches,
    overlong_penalty,
    reward_at_last_token,
)
from tandem.algorithms.token_weights import token_weights
from tandem.config.algorithms import PolicyGradientConfig
from tandem.discovery import class_named

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.types import TokenLoss

Config = TypeVar("Config", bound=PolicyGradientConfig)


class PolicyGradient(ABC, Generic[Config]):
    """An `Algorithm` with the loss that `config.loss` names and the KL to a reference, in the reward or in the loss.

    A subclass implements `estimate`; in `__init__` it may extend `needs`, and set `value_loss` or another `loss`.
    """

    def __init__(self, config: Config, max_response_tokens: int) -> None:
        self.config = config
        self._max_response_tokens = max_response_tokens
        self._kl_coefficient = config.kl.coefficient
        self._reward_moments = RunningMoments()
        self.loss: PolicyLoss[Any] = make_loss(config)
        self.value_loss: TokenLoss[Tensor] | None = None
        self.needs = frozenset[Need]()
        if config.kl.place != "none":
            self.needs |= {Need.REF_LOGPROBS}
        if config.kl.place == "reward" or self.loss.selects_by_logprobs:
            self.needs |= {Need.OLD_LOGPROBS}

    @property
    def zero_without_advantage(self) -> bool:
        return self.loss.zero_without_advantage

    @abstractmethod
    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        """Advantages from rewards that the KL penalty has already been taken off.

        `rollouts.rewards_B` has them by trajectory, `rewards_T` by token: the trajectory's own on the last policy token
        of each of its branches, or with `turn_rewards: by_turn` in part where turns earned them.
        """

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Shape the rewards as configured, estimate advantages, let the loss select tokens."""
        rollouts = self._shape_rewards(rollouts)
        rewards_T = self._rewards_by_token(rollouts)
        if self.config.kl.place == "reward":
            result = self._estimate_with_kl(rollouts, rewards_T)
        else:
            result = self.estimate(rollouts, rewards_T)
        result.selected_T = self.loss.select(rollouts, result.advantages_T)
        return result

    def _rewards_by_token(self, rollouts: Rollouts) -> Tensor:
        """What follows each token; its sum from a token to the end of the branch is what the trajectory still came to.

        By turn, a turn's reward lies on its own last token, and the end of a branch has what turns up to there have not
        earned: what no turn earned, and what those of later branches did.
        """
        rewards_B, places = rollouts.rewards_B, (rollouts.mask_T, rollouts.trajectories_T, rollouts.branches_T)
        rewards_T = reward_at_last_token(rewards_B, *places)
        if self.config.turn_rewards == "whole" or rollouts.turn_rewards_T is None:
            return rewards_T
        earned_T = earned_so_far(rollouts.turn_rewards_T, rollouts.mask_T, rollouts.trajectories_T)
        are_ends_T = reward_at_last_token(rewards_B.new_ones(len(rewards_B)), *places)
        return (rewards_T - are_ends_T * earned_T + rollouts.turn_rewards_T * rollouts.mask_T).float()

    def _shape_rewards(self, rollouts: Rollouts) -> Rollouts:
        """The rewards normalised, clipped, then lowered for length, each only where configured; float32 `[B]`.

        Rewards of greedy answers are normalised and clipped with the others, which they are compared with.
        """
        rewards_B, greedy_B = rollouts.rewards_B.double(), rollouts.greedy_rewards_B
        if self.config.normalize_rewards:
            self._reward_moments.update(rewards_B[rollouts.scored_B])
            if greedy_B is not None:
                self._reward_moments.update(greedy_B[~greedy_B.isnan()].double())
        shaped_B = self._normalize_and_clip(rewards_B)
        if self.config.overlong_buffer > 0:
            buffer_tokens = self.config.overlong_buffer * self._max_response_tokens
            lengths_B = longest_branches(rollouts.trajectories_T, rollouts.branches_T, len(shaped_B))
            shaped_B = shaped_B + overlong_penalty(lengths_B, self._max_response_tokens, buffer_tokens)
        shaped_greedy_B = None if greedy_B is None else self._normalize_and_clip(greedy_B.double()).float()
        return replace(rollouts, rewards_B=(shaped_B * rollouts.scored_B).float(), greedy_rewards_B=shaped_greedy_B)

    def _normalize_and_clip(self, rewards_B: Tensor) -> Tensor:
        if self.config.normalize_rewards:
            rewards_B = self._reward_moments.normalize(rewards_B)
        limit = self.config.clip_rewards
        return rewards_B if limit is None else rewards_B.clamp(-limit, limit)

    def _estimate_with_kl(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        """Take the KL to the reference off the rewards, estimate, then let the KL coefficient follow its target."""
        assert rollouts.old_logprobs_T is not None and rollouts.ref_logprobs_T is not None
        coefficient = self._kl_coefficient
        estimator = self.config.kl.estimator
        kl_T = kl_estimate(estimator, rollouts.old_logprobs_T, rollouts.ref_logprobs_T) * rollouts.mask_T
        kl_B = rollouts.trajectories_T.bincount(kl_T.double(), minlength=len(rollouts.rewards_B))
        penalized = replace(rollouts, rewards_B=(rollouts.rewards_B - coefficient * kl_B).float())
        result = self.estimate(penalized, rewards_T - coefficient * kl_T)
        result.metrics["actor/kl_coefficient"] = coefficient
        if self.config.kl.control == "adaptive":
            mean_kl = kl_T.double().sum().item() / max(int(rollouts.mask_T.sum()), 1)
            self._adapt_kl_coefficient(mean_kl, trajectories=int(rollouts.scored_B.sum()))
        return result

    def _adapt_kl_coefficient(self, mean_kl: float, trajectories: int) -> None:
        """The proportional controller of Ziegler et al. 2019, section 2.2; `mean_kl` is that of a token."""
        kl = self.config.kl
        error = min(max(mean_kl / kl.target - 1, -0.2), 0.2)
        share_of_horizon = min(trajectories / kl.horizon_trajectories, 1.0)
        self._kl_coefficient *= 1 + error * share_of_horizon

    def weights(self, mask_T: Tensor, trajectories_T: Tensor) -> Tensor:
        return token_weights(self.config.loss.aggregation, mask_T, trajectories_T, self._max_response_tokens)

    def state(self) -> dict[str, float]:
        return {"kl_coefficient": self._kl_coefficient, **asdict(self._reward_moments)}

    def load_state(self, state: dict[str, float]) -> None:
        self._kl_coefficient = state["kl_coefficient"]
        self._reward_moments = RunningMoments(state["count"], state["mean"], state["squares"])


def make_loss(algorithm: PolicyGradientConfig) -> PolicyLoss[Any]:
    """The policy loss that `algorithm.loss.type` names."""
    kind: type[PolicyLoss[Any]] = class_named("tandem.algorithms.builtin", algorithm.loss.type, PolicyLoss)
    return kind(algorithm.loss, algorithm)
