"""Policy losses: a surrogate of the objective at each token, with entropy and KL terms around it.

In formulas A is the token's advantage, pi the policy that is trained, r = pi / old policy; (x) in square brackets is
taken without gradient. The term of a token is what is minimised: the published objective with its sign turned.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tandem.algorithms.base import Rollouts
from tandem.algorithms.losses import MAX_LOG_RATIO, kl_estimate
from tandem.config.algorithms import (
    CISPOLossConfig,
    ClipLossConfig,
    ClipRangeConfig,
    DPPOLossConfig,
    LossConfig,
    PolicyGradientConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
)
from tandem.types import Outputs, TokenColumns

Config = TypeVar("Config", bound=LossConfig)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a surrogate reads of scored tokens, all `[S]`."""

    logprobs_S: Tensor
    log_ratio_S: Tensor
    """log r; without old log-probs 0, with a gradient."""
    advantages_S: Tensor
    columns: TokenColumns[Tensor]

    @property
    def ratio_S(self) -> Tensor:
        return bounded_exp(self.log_ratio_S)


@dataclass(frozen=True, slots=True)
class PolicyLoss(ABC, Generic[Config]):
    """term = w * surrogate - entropy_coefficient * entropy + kl.coefficient * kl (with kl.place: loss).

    w is the importance weight of the rollout correction, 1 without. Columns: `advantages`, `weights` and `shares`;
    `importance_weights` and `ref_logprobs` where there are any. No `old_logprobs` says
    that these trajectories are trained on exactly once, by the weights that made them: then r is 1, with a gradient.
    """

    config: Config
    algorithm: PolicyGradientConfig

    token_local = True
    acts_without_advantage = False
    """The surrogate may have a gradient at a token whose advantage is 0."""
    selects_by_logprobs = False
    """`select` reads the policy's log-probs."""

    @abstractmethod
    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """(surrogate, bool: the loss's trust region clips the token's gradient), both `[S]`."""

    def select(self, rollouts: Rollouts, advantages_T: Tensor) -> Tensor | None:
        """Tokens to treat apart, chosen once a step: `columns.selected`."""
        return None

    def corrected(self, surrogate_S: Tensor, importance_weights_S: Tensor, tokens: Tokens) -> Tensor:
        """The surrogate with the rollout correction's importance weights; KL and entropy have none."""
        return importance_weights_S * surrogate_S

    @property
    def zero_without_advantage(self) -> bool:
        algorithm = self.algorithm
        return not self.acts_without_advantage and algorithm.kl.place != "loss" and algorithm.entropy_coefficient == 0

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        entropy_S, weights_S, shares_S = outputs.entropy_S, columns.weights, columns.shares
        assert entropy_S is not None and weights_S is not None and shares_S is not None
        tokens = _tokens(outputs, columns)
        surrogate_S, clipped_S = self.surrogate(tokens)
        if columns.importance_weights is not None:
            surrogate_S = self.corrected(surrogate_S, columns.importance_weights, tokens)
        loss = (weights_S * surrogate_S).sum()
        metrics = {"actor/pg_loss": loss.detach()}
        by_token = {
            "actor/entropy": entropy_S,
            "actor/clip_fraction": clipped_S.float(),
            "actor/ppo_kl": -tokens.log_ratio_S,
            "actor/ratio/mean": tokens.ratio_S,
        }
        if self.algorithm.entropy_coefficient != 0:
            loss = loss - self.algorithm.entropy_coefficient * (weights_S * entropy_S).sum()
        if columns.ref_logprobs is not None:
            kl = self.algorithm.kl
            kl_S = kl_estimate(kl.estimator, tokens.logprobs_S, columns.ref_logprobs)
            by_token["actor/kl"] = kl_S
            if kl.place == "loss":
                loss = loss + kl.coefficient * (weights_S * kl_S).sum()
        means = {name: (shares_S * values_S.detach()).sum() for name, values_S in by_token.items()}
        return loss, metrics | means


def _tokens(outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> Tokens:
    logprobs_S, old_logprobs_S, advantages_S = outputs.logprobs_S, columns.old_logprobs, columns.advantages
    assert logprobs_S is not None and advantages_S is not None
    if old_logprobs_S is None:
        old_logprobs_S = logprobs_S.detach()
    return Tokens(logprobs_S, logprobs_S - old_logprobs_S, advantages_S, columns)


class ClipLoss(PolicyLoss[ClipLossConfig]):
    """Clipped surrogate (Schulman et al. 2017, equation 7) with asymmetric bounds (DAPO, Yu et al. 2025).

    max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)); with dual clip and A < 0 at most -A dual_clip
    (Ye et al. 2020, equation 5).
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        surrogate_S, clipped_S = clipped_surrogate(self.config, tokens.ratio_S, tokens.advantages_S)
        if self.config.dual_clip is not None:
            bound_S = -tokens.advantages_S * self.config.dual_clip
            surrogate_S = torch.where(tokens.advantages_S < 0, surrogate_S.minimum(bound_S), surrogate_S)
        return surrogate_S, clipped_S


class ReinforceLoss(PolicyLoss[ReinforceLossConfig]):
    """-A log pi (Williams 1992)."""

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return -tokens.advantages_S * tokens.logprobs_S, torch.zeros_like(tokens.advantages_S)


class CISPOLoss(PolicyLoss[CISPOLossConfig]):
    """-[clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)] A log pi (MiniMax-M1, 2025, equations 4 and 5)."""

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio_S = tokens.ratio_S.detach()
        weight_S = ratio_S.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)
        return -weight_S * tokens.advantages_S * tokens.logprobs_S, weight_S != ratio_S


class SAPOLoss(PolicyLoss[SAPOLossConfig]):
    """-A (4 / t) sigmoid(t (r - 1)), t = temperature_positive where A > 0, else temperature_negative (Gao et al. 2025).

    Nothing is held back: the gate has slope 1 at r = 1 and closes smoothly on both sides.
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        temperature_S = torch.full_like(tokens.advantages_S, self.config.temperature_negative)
        temperature_S[tokens.advantages_S > 0] = self.config.temperature_positive
        gate_S = 4 / temperature_S * torch.sigmoid(temperature_S * (tokens.ratio_S - 1))
        return -tokens.advantages_S * gate_S, torch.zeros_like(gate_S)


class DPPOLoss(PolicyLoss[DPPOLossConfig]):
    """-A M r (Qi et al. 2026): r = pi / mu is against the policy that sampled, and M is 0 where it grew too far.

    M = 0 if the step leads away (A > 0 and r > 1, or A < 0 and r < 1) and D(mu, pi) > max_divergence, else 1. D is of
    two outcomes, the token and any other (section 4.2): |mu - pi| with tv, KL(mu || pi) with kl. Ratios above
    `max_ratio` are cut in value and keep log pi's gradient (section 5.4).
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        advantages_S, sampled_S = tokens.advantages_S, tokens.columns.rollout_logprobs
        assert sampled_S is not None
        log_ratio_S = tokens.logprobs_S - sampled_S
        away_S = torch.where(advantages_S > 0, log_ratio_S > 0, log_ratio_S < 0)
        clipped_S = away_S & (self._divergence(sampled_S, tokens.logprobs_S.detach()) > self.config.max_divergence)
        weight_S = bounded_exp(log_ratio_S.detach()).clamp(max=self.config.max_ratio) * ~clipped_S
        return -advantages_S * weight_S * (tokens.logprobs_S - tokens.logprobs_S.detach()).exp(), clipped_S

    def _divergence(self, sampled_S: Tensor, logprobs_S: Tensor) -> Tensor:
        mu_S, pi_S = sampled_S.exp(), logprobs_S.exp()
        if self.config.divergence == "tv":
            return (mu_S - pi_S).abs()
        tiny = 1e-8  # probabilities of 1 leave nothing to the other outcome
        return mu_S * (sampled_S - logprobs_S) + (1 - mu_S) * ((1 - mu_S + tiny) / (1 - pi_S + tiny)).log()


def clipped_surrogate(config: ClipRangeConfig, ratio_S: Tensor, advantages_S: Tensor) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clip took the gradient."""
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return torch.maximum(plain_S, clipped_S), clipped_S > plain_S


def bounded_exp(log_ratio_S: Tensor) -> Tensor:
    return log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
