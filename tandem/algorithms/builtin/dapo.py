"""DAPO (Yu et al. 2025): GRPO with a higher upper clip, resampled groups and a soft punishment of overlong answers."""

from typing import Literal

from tandem.algorithms.builtin.clip import ClipLossConfig
from tandem.algorithms.builtin.grpo import GRPO, GRPOFamilyConfig
from tandem.config.algorithms import PolicyLossConfig
from tandem.config.base import NonNegativeInt, Share


class DAPOConfig(GRPOFamilyConfig):
    """GRPO with clip-higher, dynamic sampling and soft overlong punishment (arXiv:2503.14476)."""

    type: Literal["dapo"] = "dapo"
    loss: PolicyLossConfig = ClipLossConfig(clip_ratio_high=0.28)
    resample_rounds: NonNegativeInt = 10
    overlong_buffer: Share = 0.2


class DAPO(GRPO):
    """The advantage of GRPO; what is new is in the configuration, where every algorithm has it."""
