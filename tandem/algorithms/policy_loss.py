"""What policy losses share: a surrogate of the objective at each token, with entropy and KL terms around it.

In formulas A is the token's advantage, pi the policy that is trained, r = pi / old policy; (x) in square brackets is
taken without gradient. The term of a token is what is minimised: the published objective with its sign turned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tandem.algorithms.base import Rollouts
from tandem.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from tandem.config.algorithms import ClipRangeConfig, LossConfig, PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.types import Outputs, TokenColumns

Config = TypeVar("Config", bound=LossConfig)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a surrogate reads: the scored tokens of a micro-batch, all `[S]`."""

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

    w is the importance weight of the rollout correction, 1 without. Columns: `advantages`, `loss_weights` and `shares`;
    `importance_weights` and `ref_logprobs` where there are any. No `old_logprobs` says that these trajectories are
    trained on exactly once, and were made by the weights that are trained: then r is 1, with a gradient. The loop
    asserts it (`controller/learning.py`): tokens of older weights always come with old log-probs.
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
        entropy_S, weights_S, shares_S = outputs.entropy_S, columns.loss_weights, columns.shares
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


def clipped_surrogate(config: ClipRangeConfig, ratio_S: Tensor, advantages_S: Tensor) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clip took the gradient."""
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return plain_S.maximum(clipped_S), clipped_S > plain_S


def bounded_exp(log_ratio_S: Tensor) -> Tensor:
    """The ratio, which stays finite, as its gradient does."""
    return log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def trajectory_mean(values_S: Tensor, tokens: Tokens) -> Tensor:
    """At each token the mean over its trajectory, for losses with `token_local = False`."""
    trajectories_S = tokens.columns.trajectories
    assert trajectories_S is not None
    count_R = trajectories_S.bincount().clamp(min=1)
    sums_R = values_S.new_zeros(len(count_R)).index_add(0, trajectories_S, values_S)
    return (sums_R / count_R)[trajectories_S]
