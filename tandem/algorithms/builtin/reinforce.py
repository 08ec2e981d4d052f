"""REINFORCE (Williams 1992): the log-likelihood of what was rewarded, without ratio and clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.algorithms.policy_loss import PolicyLoss, Tokens
from tandem.config.algorithms import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


class ReinforceLossConfig(LossConfig):
    """Log-likelihood times advantage, without ratio and clip (Williams 1992)."""

    divides_by: ClassVar[Literal["old_policy", "engine", "nothing"]] = "nothing"

    type: Literal["reinforce"] = "reinforce"


class ReinforceLoss(PolicyLoss[ReinforceLossConfig]):
    """-A log pi (Williams 1992)."""

    def surrogate(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        import torch

        return -tokens.advantages_S * tokens.logprobs_S, torch.zeros_like(tokens.advantages_S)
