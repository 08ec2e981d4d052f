"""Soft Adaptive Policy Optimization (Gao et al. 2025): a smooth gate on the ratio in the place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.algorithms.policy_loss import PolicyLoss, Tokens
from tandem.config.algorithms import Aggregation, LossConfig, PolicyLossConfig
from tandem.config.base import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class SAPOLossConfig(LossConfig):
    """A smooth gate on the ratio in the place of a clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: PositiveFloat = 1.0
    temperature_negative: PositiveFloat = 1.05
    """At negative advantages; a higher one closes the gate sooner."""
    aggregation: Aggregation = "sequence_mean_token_mean"


class SAPOConfig(GRPOFamilyConfig):
    """GRPO's advantages, with a smooth gate on the ratio (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    loss: PolicyLossConfig = SAPOLossConfig()


class SAPO(GRPO):
    """The advantage of GRPO."""


class SAPOLoss(PolicyLoss[SAPOLossConfig]):
    """-A (4 / t) sigmoid(t (r - 1)), t = temperature_positive where A > 0, else temperature_negative (Gao et al. 2025).

    Nothing is clipped: the gate has slope 1 at r = 1 and closes smoothly on both sides.
    """

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        import torch

        temperature_S = torch.full_like(tokens.advantages_S, self.config.temperature_negative)
        temperature_S[tokens.advantages_S > 0] = self.config.temperature_positive
        gate_S = 4 / temperature_S * torch.sigmoid(temperature_S * (tokens.ratio_S - 1))
        return -tokens.advantages_S * gate_S, torch.zeros_like(gate_S)
