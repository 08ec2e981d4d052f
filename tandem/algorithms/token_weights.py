"""The weights by which the losses of single tokens become one number: loss = sum(weights * term)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.config.algorithms import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


def token_weights(aggregation: Aggregation, mask_T: Tensor, trajectories_T: Tensor, max_response_tokens: int) -> Tensor:
    """Each token's share in the loss; float32 `[T]`, 0 outside `mask_T`.

    Only trajectories with a trained token are sequences: a trajectory whose reward failed does not thin out the others.
    """
    import torch

    trajectories_A = trajectories_T[mask_T]
    tokens_B = trajectories_A.bincount(minlength=1)
    sequences = tokens_B.count_nonzero()
    divisor_A = {
        "token_mean": tokens_B.sum(),  # DAPO (Yu et al. 2025)
        "sequence_mean_token_sum": sequences,  # the policy gradient as in REINFORCE
        "sequence_mean_token_mean": sequences * tokens_B[trajectories_A],  # GRPO (Shao et al. 2024)
        "fixed_length": sequences * max_response_tokens,  # Dr. GRPO (Liu et al. 2025)
    }[aggregation]
    weights_T = torch.zeros(len(mask_T))
    weights_T[mask_T] = (1 / divisor_A.double()).float()
    return weights_T
