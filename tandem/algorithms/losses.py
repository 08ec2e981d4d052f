"""What losses share: the weights by which token losses become one, the KL forms, and losses without a policy gradient.

Each loss is a `TokenLoss`: sum(weights * term).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.config.algorithms import Aggregation, KLEstimator
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
    KL(reference || policy) for k3, and zero for k1. `k1+` and `k3+` are straight-through: their value, k2's gradient.
    """
    log_ratio = ref_logprobs - logprobs
    k2 = log_ratio.square() / 2
    if estimator == "k2":
        return k2
    if estimator.startswith("k1"):
        value = -log_ratio
    else:
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = log_ratio.exp() - 1 - log_ratio
    return k2 - k2.detach() + value.detach() if estimator.endswith("+") else value


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
