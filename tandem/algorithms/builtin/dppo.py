"""DPPO (Qi et al. 2026): the trust region is a divergence of probabilities, and around the policy that sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens, bounded_exp
from tandem.config.algorithms import LossConfig, PolicyGradientConfig, PolicyLossConfig
from tandem.config.base import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class DPPOLossConfig(LossConfig):
    """Tokens leave the loss when the policy moves too far from the one that sampled them (arXiv:2602.04879)."""

    divides_by: ClassVar[Literal["old_policy", "engine", "nothing"]] = "engine"

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of the trained from the sampling policy, over two outcomes: the token, and any other."""
    max_divergence: PositiveFloat = 0.15
    """0.15 with tv, 0.05 with kl are usual."""
    max_ratio: float = Field(default=20.0, gt=1)
    """Importance weights are cut here."""

    def find_mistakes(self, algorithm: PolicyGradientConfig) -> Iterator[str]:
        correction = algorithm.rollout_correction.type
        if correction != "none":
            yield (
                f"rollout_correction.type: {correction} would correct twice: the ratio of loss.type: dppo is to the "
                "engine's own log-probs already; leave it out"
            )


class DPPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, without the tokens whose probability moved too far (arXiv:2602.04879)."""

    type: Literal["dppo"] = "dppo"
    loss: PolicyLossConfig = DPPOLossConfig()


class DPPO(GRPO):
    """The advantage of GRPO."""


class DPPOLoss(PolicyLoss[DPPOLossConfig]):
    """-A M r (Qi et al. 2026): r = pi / mu is against the policy that sampled, and M is 0 where it grew too far.

    M = 0 if the step leads away (A > 0 and r > 1, or A < 0 and r < 1) and D(mu, pi) > max_divergence, else 1. D is of
    two outcomes, the token and any other (section 4.2): |mu - pi| with tv, KL(mu || pi) with kl. Ratios above
    `max_ratio` are cut in value and keep log pi's gradient (section 5.4).
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        logprobs_S, sampled_S = tokens.logprobs_S, tokens.columns.rollout_logprobs
        assert sampled_S is not None
        log_ratio_S = logprobs_S - sampled_S
        away_S = (log_ratio_S > 0).where(tokens.advantages_S > 0, log_ratio_S < 0)
        clipped_S = away_S & (self._divergence(sampled_S, logprobs_S.detach()) > self.config.max_divergence)
        weight_S = bounded_exp(log_ratio_S.detach()).clamp(max=self.config.max_ratio) * ~clipped_S
        gradient_of_log_pi_S = (logprobs_S - logprobs_S.detach()).exp()  # its value is 1
        return -tokens.advantages_S * weight_S * gradient_of_log_pi_S, clipped_S

    def _divergence(self, sampled_S: Tensor, logprobs_S: Tensor) -> Tensor:
        mu_S, pi_S = sampled_S.exp(), logprobs_S.exp()
        if self.config.divergence == "tv":
            return (mu_S - pi_S).abs()
        tiny = 1e-8  # probabilities of 1 leave nothing to the other outcome
        return mu_S * (sampled_S - logprobs_S) + (1 - mu_S) * ((1 - mu_S + tiny) / (1 - pi_S + tiny)).log()
