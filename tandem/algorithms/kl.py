"""The distance to the reference policy, estimated at the tokens that were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.config.algorithms import KLEstimator

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at ± this before exp, which keeps value and gradient finite in float32."""


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
