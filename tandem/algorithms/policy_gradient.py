"""What policy-gradient algorithms share: a new one is a subclass that says how rewards become advantages."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts, Signal
from tandem.algorithms.loss_types import make_loss
from tandem.algorithms.losses import kl_estimate, token_weights
from tandem.config.algorithms import PolicyGradientConfig
from tandem.types import TokenLoss

Config = TypeVar("Config", bound=PolicyGradientConfig)


class PolicyGradient(ABC, Generic[Config]):
    """An `Algorithm` with the loss that `config.loss` names and the KL to a reference, in the reward or in the loss.

    A subclass implements `estimate`; it may extend `needs`, and set `value_loss` or another `loss`.
    """

    def __init__(self, config: Config, max_response_tokens: int) -> None:
        self.config = config
        self._max_response_tokens = max_response_tokens
        self._kl_coefficient = config.kl.coefficient
        self._moments = {"count": 0.0, "mean": 0.0, "squares": 0.0}
        """Of all rewards so far; squares: the sum of squared distances from the mean."""
        self.needs = frozenset[Signal]() if config.kl.place == "none" else frozenset({Signal.REF_LOGPROBS})
        self._policy_loss = make_loss(config)
        self.loss: TokenLoss[Tensor] = self._policy_loss
        self.value_loss: TokenLoss[Tensor] | None = None
        self.zero_without_advantage = self._policy_loss.zero_without_advantage

    @abstractmethod
    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        """Advantages from rewards that the KL penalty has already been taken off.

        `rollouts.rewards_B` has them by row, `rewards_T` by token: the row's own on its last policy token.
        """

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Shape the rewards as configured, estimate, let the loss select tokens."""
        rollouts = self._punish_overlong(self._scale(rollouts))
        rewards_T = reward_at_last_token(rollouts.rewards_B, rollouts.mask_T, rollouts.rows_T)
        if self.config.kl.place == "reward":
            result = self._estimate_with_kl(rollouts, rewards_T)
        else:
            result = self.estimate(rollouts, rewards_T)
        result.selected_T = self._policy_loss.select(rollouts, result.advantages_T)
        return result

    def _scale(self, rollouts: Rollouts) -> Rollouts:
        """Normalise by the running moments, this step's included (Chan et al. 1979), and clip."""
        rewards_B, clip = rollouts.rewards_B.double(), self.config.clip_rewards
        scored = rewards_B[rollouts.scored_B]
        if self.config.normalize_rewards and len(scored):
            count, total = self._moments["count"], self._moments["count"] + len(scored)
            shift = scored.mean().item() - self._moments["mean"]
            spread = (scored - scored.mean()).square().sum().item() + shift**2 * count * len(scored) / total
            mean, squares = self._moments["mean"] + shift * len(scored) / total, self._moments["squares"] + spread
            self._moments = {"count": total, "mean": mean, "squares": squares}
            rewards_B = (rewards_B - mean) / ((squares / max(total - 1, 1)) ** 0.5 + 1e-8)
        if clip is not None:
            rewards_B = rewards_B.clamp(-clip, clip)
        return replace(rollouts, rewards_B=(rewards_B * rollouts.scored_B).float())

    def _punish_overlong(self, rollouts: Rollouts) -> Rollouts:
        """Soft overlong punishment (DAPO, Yu et al. 2025, equation 13): 0 at the buffer's start, -1 at its end."""
        longest = self._max_response_tokens
        buffer = self.config.overlong_buffer * longest
        if buffer == 0:
            return rollouts
        lengths_B = torch.bincount(rollouts.rows_T, minlength=len(rollouts.rewards_B))
        return replace(rollouts, rewards_B=rollouts.rewards_B + ((longest - buffer - lengths_B) / buffer).clamp(-1, 0))

    def _estimate_with_kl(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        """Take the KL off the rewards, estimate, then move the KL coefficient."""
        rows_T, mask_T, kl = rollouts.rows_T, rollouts.mask_T, self.config.kl
        assert rollouts.ref_logprobs_T is not None
        coefficient = self._kl_coefficient
        kl_T = kl_estimate(kl.estimator, rollouts.policy_logprobs_T, rollouts.ref_logprobs_T) * mask_T
        penalties_B = coefficient * torch.bincount(rows_T, kl_T.double(), minlength=len(rollouts.rewards_B))
        shaped = replace(rollouts, rewards_B=(rollouts.rewards_B - penalties_B).float())
        result = self.estimate(shaped, rewards_T - coefficient * kl_T)
        result.metrics["actor/kl_coefficient"] = coefficient
        if kl.control == "adaptive":  # Ziegler et al. 2019, section 2.2, on the mean KL of a token
            error = (kl_T.double().sum().item() / max(int(mask_T.sum()), 1) / kl.target) - 1
            share = min(int(rollouts.scored_B.sum()) / kl.horizon_trajectories, 1.0)
            self._kl_coefficient *= 1 + min(max(error, -0.2), 0.2) * share
        return result

    def weights(self, mask_T: Tensor, rows_T: Tensor) -> Tensor:
        return token_weights(self.config.loss.aggregation, mask_T, rows_T, self._max_response_tokens)

    def state(self) -> dict[str, float]:
        return {"kl_coefficient": self._kl_coefficient, **self._moments}

    def load_state(self, state: dict[str, float]) -> None:
        self._kl_coefficient = state["kl_coefficient"]
        self._moments = {name: state[name] for name in self._moments}


def reward_at_last_token(rewards_B: Tensor, mask_T: Tensor, rows_T: Tensor) -> Tensor:
    """The reward of each row on its last policy token, 0 on all others; float32 `[T]`."""
    tokens = mask_T.nonzero().squeeze(1)
    rows = rows_T[tokens]
    last = torch.searchsorted(rows, rows, right=True) - 1
    return torch.zeros(len(mask_T)).index_put((tokens[last],), rewards_B[rows])
