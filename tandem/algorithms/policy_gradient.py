"""What policy-gradient algorithms share: a new one is a subclass that says how rewards become advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from tandem.algorithms.advantage import reward_at_last_token, row_sums
from tandem.algorithms.aggregation import Aggregation, token_weights
from tandem.algorithms.base import Advantages, Rollouts, Signal
from tandem.algorithms.kl import KLCoefficient, kl_estimate
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.tree import PolicyGradientConfig
from tandem.types import TokenLoss


class PolicyGradient(ABC):
    """An `Algorithm` with the clipped loss and the KL to a reference, in the reward or in the loss.

    A subclass implements `estimate`; it may extend `needs`, and set `value_loss` or another `loss`.
    """

    def __init__(self, config: PolicyGradientConfig, max_response_tokens: int) -> None:
        self._aggregation: Aggregation = config.aggregation
        self._max_response_tokens = max_response_tokens
        self._kl = config.kl
        self._kl_coefficient = KLCoefficient(config.kl)
        self.needs = frozenset[Signal]() if config.kl.place == "none" else frozenset({Signal.REF_LOGPROBS})
        self.loss: TokenLoss[torch.Tensor] = PolicyLoss(
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            entropy_coefficient=config.entropy_coefficient,
            kl_coefficient=config.kl.coefficient if config.kl.place == "loss" else 0.0,
            kl_estimator=config.kl.estimator,
        )
        self.value_loss: TokenLoss[torch.Tensor] | None = None
        self.zero_without_advantage = config.kl.place != "loss" and config.entropy_coefficient == 0

    @abstractmethod
    def estimate(self, rollouts: Rollouts, rewards_T: torch.Tensor) -> Advantages:
        """Advantages from rewards that the KL penalty has already been taken off.

        `rollouts.rewards_B` has them by row, `rewards_T` by token: the row's own reward on its last policy token. All
        of a row without a reward is 0.
        """

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Take the KL off the rewards where it is placed there, estimate, then move the KL coefficient."""
        rewards_T = reward_at_last_token(rollouts.rewards_B, rollouts.mask_T, rollouts.rows_T)
        if self._kl.place != "reward":
            return self.estimate(rollouts, rewards_T)
        assert rollouts.ref_logprobs_T is not None
        kl_T = kl_estimate(self._kl.estimator, rollouts.policy_logprobs_T, rollouts.ref_logprobs_T) * rollouts.mask_T
        coefficient, rows = self._kl_coefficient.value, len(rollouts.rewards_B)
        penalties_B = coefficient * row_sums(kl_T, rollouts.rows_T, rows)
        shaped = replace(rollouts, rewards_B=(rollouts.rewards_B - penalties_B).float())
        result = self.estimate(shaped, rewards_T - coefficient * kl_T)
        trajectories, tokens = int(rollouts.scored_B.sum()), int(rollouts.mask_T.sum())
        result.metrics["actor/kl_coefficient"] = coefficient
        result.metrics["reward/kl_penalty/mean"] = penalties_B.sum().item() / max(trajectories, 1)
        self._kl_coefficient.update(kl_T.double().sum().item() / max(tokens, 1), trajectories)
        return result

    def weights(self, mask_T: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
        return token_weights(self._aggregation, mask_T, rows_T, self._max_response_tokens)

    def state(self) -> dict[str, float]:
        return self._kl_coefficient.state()

    def load_state(self, state: dict[str, float]) -> None:
        self._kl_coefficient.load_state(state)
