"""Dr. GRPO, "GRPO done right" (Liu et al. 2025): neither the deviation nor the length of an answer scales its loss."""

from typing import Literal

from tandem.algorithms.builtin.clip import ClipLossConfig
from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.config.algorithms import PolicyLossConfig


class DrGRPOConfig(GRPOFamilyConfig):
    """GRPO without the two divisors that favour short right answers and easy or hard prompts (arXiv:2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    normalize_by_std: bool = False
    loss: PolicyLossConfig = ClipLossConfig(aggregation="fixed_length")


class DrGRPO(GRPO):
    """Advantage of every token of a trajectory = reward - group mean."""
