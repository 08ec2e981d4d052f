"""The distance to the reference policy: estimators per token, and the coefficient that weighs it."""

from __future__ import annotations

from typing import Literal

import torch

from tandem.config.tree import KLConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at ± this before exp, which keeps value and gradient finite in float32."""


def kl_estimate(
    estimator: Literal["k1", "k2", "k3"], logprobs: torch.Tensor, ref_logprobs: torch.Tensor
) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token that the policy sampled; any shape, nats.

    With d = log reference - log policy (Schulman, "Approximating KL Divergence", 2020):

        k1 = -d                  unbiased, may be negative
        k2 = d^2 / 2             small bias, never negative
        k3 = exp(d) - 1 - d      unbiased, never negative

    As a term of the loss it is the gradient that counts (Tang & Munos 2025): in expectation over the policy's own
    samples it is that of KL(policy || reference) for k2, of KL(reference || policy) for k3, and zero for k1.
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


class KLCoefficient:
    """The weight of the KL: constant, or steered towards a target (Ziegler et al. 2019, section 2.2).

        error = clip(observed / target - 1, -0.2, 0.2)
        value <- value * (1 + error * trajectories / horizon)

    `observed` and `target` are means over tokens. A step counts for at most one horizon, so the value stays positive.
    """

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.value = config.coefficient

    def update(self, observed_kl: float, trajectories: int) -> None:
        """After a step of `trajectories` whose mean token KL was `observed_kl`."""
        if self._config.control == "fixed":
            return
        error = min(max(observed_kl / self._config.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(trajectories / self._config.horizon_trajectories, 1.0)

    def state(self) -> dict[str, float]:
        return {"kl_coefficient": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = state["kl_coefficient"]
