"""The losses, and the weights by which token losses become one. Each is a `TokenLoss`: sum(weights * term)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.config.tree import Aggregation, KLEstimator, PolicyGradientConfig
from tandem.types import Outputs, TokenColumns

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at ± this before exp, which keeps value and gradient finite in float32."""


def token_weights(aggregation: Aggregation, mask_T: Tensor, rows_T: Tensor, max_response_tokens: int) -> Tensor:
    """Each token's share in the loss; float32 `[T]`, 0 outside `mask_T`.

    Only rows with a trained token are sequences: a row whose reward failed does not thin out the others.
    """
    rows_K = rows_T[mask_T]
    tokens_B = torch.bincount(rows_K, minlength=1)
    sequences = tokens_B.count_nonzero()
    divisor_K = {
        "token_mean": tokens_B.sum(),  # DAPO (Yu et al. 2025)
        "sequence_mean_token_sum": sequences,  # the policy gradient as in REINFORCE
        "sequence_mean_token_mean": sequences * tokens_B[rows_K],  # GRPO (Shao et al. 2024)
        "fixed_length": sequences * max_response_tokens,  # Dr. GRPO (Liu et al. 2025)
    }[aggregation]
    weights_T = torch.zeros(len(mask_T))
    weights_T[mask_T] = (1 / divisor_K.double()).float()
    return weights_T


def kl_estimate(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, nats (Schulman, "Approximating KL Divergence", 2020).

    k1 and k3 are unbiased, k2 nearly so; k1 may be negative. As a term of the loss it is the gradient that counts
    (Tang & Munos 2025): in expectation over the policy's own samples it is that of KL(policy || reference) for k2, of
    KL(reference || policy) for k3, and zero for k1.
    """
    log_ratio = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return log_ratio.exp() - 1 - log_ratio


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, equation 7) with asymmetric bounds (DAPO, Yu et al. 2025).

    For a token with advantage A and ratio r = policy / old policy:

        surrogate = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
        dual clip: where A < 0, surrogate = min(surrogate, -A dual_clip)        (Ye et al. 2020, equation 5)
        term = surrogate - entropy_coefficient * entropy + kl.coefficient * kl  (with kl.place: loss)

    Columns: `advantages`, `weights` and `shares`; `ref_logprobs` where there is a reference. No `old_logprobs` says
    that these trajectories are trained on exactly once, by the weights that made them: then r is 1, with a gradient.
    """

    config: PolicyGradientConfig

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config, kl = self.config, self.config.kl
        logprobs_S, entropy_S, advantages_S = outputs.logprobs_S, outputs.entropy_S, columns.advantages
        weights_S, shares_S = columns.weights, columns.shares
        assert logprobs_S is not None and entropy_S is not None and advantages_S is not None
        assert weights_S is not None and shares_S is not None
        log_ratio_S = logprobs_S - (logprobs_S.detach() if columns.old_logprobs is None else columns.old_logprobs)
        ratio_S = log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        plain_S = -advantages_S * ratio_S
        clipped_S = -advantages_S * ratio_S.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
        surrogate_S = torch.maximum(plain_S, clipped_S)
        means = {
            "actor/entropy": entropy_S,
            "actor/clip_fraction": (clipped_S > plain_S).float(),
            "actor/ppo_kl": -log_ratio_S,
            "actor/ratio/mean": ratio_S,
        }
        if config.dual_clip is not None:
            bound_S = -advantages_S * config.dual_clip
            surrogate_S = torch.where(advantages_S < 0, surrogate_S.minimum(bound_S), surrogate_S)
        term_S = surrogate_S
        if config.entropy_coefficient != 0:
            term_S = term_S - config.entropy_coefficient * entropy_S
        if columns.ref_logprobs is not None:
            means["actor/kl"] = kl_S = kl_estimate(kl.estimator, logprobs_S, columns.ref_logprobs)
            if kl.place == "loss":
                term_S = term_S + kl.coefficient * kl_S
        metrics = {name: (shares_S * value_S.detach()).sum() for name, value_S in means.items()}
        metrics["actor/pg_loss"] = (weights_S * surrogate_S.detach()).sum()
        return (weights_S * term_S).sum(), metrics


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the squared error to the returns, or if larger, that of the value clipped around the old one (PPO2).

    Columns: `values` (the old ones), `returns` and `weights`.
    """

    value_clip: float | None

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        values_S, old_S, returns_S = outputs.values_S, columns.values, columns.returns
        assert values_S is not None and old_S is not None and returns_S is not None and columns.weights is not None
        squares_S = (values_S - returns_S).square()
        if self.value_clip is not None:
            clipped_S = old_S + (values_S - old_S).clamp(-self.value_clip, self.value_clip)
            squares_S = torch.maximum(squares_S, (clipped_S - returns_S).square())
        loss = (columns.weights * squares_S).sum() / 2
        return loss, {"critic/vf_loss": loss.detach()}


class NextTokenLoss:
    """Maximum likelihood, the loss of supervised fine-tuning: term = -log p(token), nats."""

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.logprobs_S is not None and columns.weights is not None
        loss = -(columns.weights * outputs.logprobs_S).sum()
        return loss, {"sft/loss": loss.detach()}
