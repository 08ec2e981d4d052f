"""The clipped policy-gradient loss that PPO and GRPO share. `_S` scored tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tandem.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from tandem.types import Outputs, TokenColumns


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, equation 7) with asymmetric bounds (DAPO, Yu et al. 2025).

    For a token with advantage A and ratio r = policy / old policy:

        surrogate = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
        dual clip: where A < 0, surrogate = min(surrogate, -A dual_clip)        (Ye et al. 2020, equation 5)
        term = surrogate - entropy_coefficient * entropy + kl_coefficient * kl

    Columns: `advantages`, `weights` and `shares`; `ref_logprobs` where there is a reference. No `old_logprobs` says
    that these trajectories are trained on exactly once, by the weights that made them: then r is 1, with a gradient.
    """

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """0 where the KL is in the reward or nowhere."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"

    token_local = True

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs_S, entropy_S = outputs.logprobs_S, outputs.entropy_S
        weights_S, shares_S = columns.weights, columns.shares
        assert logprobs_S is not None and entropy_S is not None and weights_S is not None and shares_S is not None
        surrogate_S, means = self.surrogate(logprobs_S, columns)
        term_S = surrogate_S
        means["actor/entropy"] = entropy_S
        if self.entropy_coefficient:
            term_S = term_S - self.entropy_coefficient * entropy_S
        if columns.ref_logprobs is not None:
            means["actor/kl"] = kl_estimate(self.kl_estimator, logprobs_S, columns.ref_logprobs)
            if self.kl_coefficient:
                term_S = term_S + self.kl_coefficient * means["actor/kl"]
        metrics = {name: (shares_S * value_S.detach()).sum() for name, value_S in means.items()}
        metrics["actor/pg_loss"] = (weights_S * surrogate_S.detach()).sum()
        return (weights_S * term_S).sum(), metrics

    def surrogate(
        self, logprobs_S: torch.Tensor, columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate of each token, and what to report of it."""
        advantages_S = columns.advantages
        assert advantages_S is not None
        old_S = logprobs_S.detach() if columns.old_logprobs is None else columns.old_logprobs
        log_ratio_S = logprobs_S - old_S
        ratio_S = log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        plain_S = -advantages_S * ratio_S
        clipped_S = -advantages_S * ratio_S.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        surrogate_S = torch.maximum(plain_S, clipped_S)
        means = {
            "actor/clip_fraction": (clipped_S > plain_S).float(),
            "actor/ppo_kl": -log_ratio_S,
            "actor/ratio/mean": ratio_S,
        }
        if self.dual_clip is not None:
            bound_S = -advantages_S * self.dual_clip
            bounded_S = (advantages_S < 0) & (surrogate_S > bound_S)
            surrogate_S = torch.where(bounded_S, bound_S, surrogate_S)
            means["actor/clip_fraction_dual"] = bounded_S.float()
        return surrogate_S, means
