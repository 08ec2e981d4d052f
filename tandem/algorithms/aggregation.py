"""How token losses become one loss: weights that are computed once for a whole optimizer step.

Loss = sum over tokens of weight * token loss, over all micro-batches and ranks. `_T` tokens of the optimizer step. Only
trained tokens (`mask_T`) count, and only rows with at least one of them are sequences: a row whose reward failed, or
that holds no policy token, does not thin out the others. Without any trained token all weights are 0.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]


def token_weights(
    mode: Aggregation, mask_T: torch.Tensor, rows_T: torch.Tensor, max_response_tokens: int
) -> torch.Tensor:
    """Each token's share in the loss; float32 `[T]`, 0 outside `mask_T`.

    With R sequences, n_i trained tokens in sequence i, N = sum n_i and M = `max_response_tokens`:

        token_mean                 1 / N            DAPO (Yu et al. 2025)
        sequence_mean_token_sum    1 / R            the policy gradient as in REINFORCE
        sequence_mean_token_mean   1 / (R * n_i)    GRPO (Shao et al. 2024)
        fixed_length               1 / (R * M)      Dr. GRPO (Liu et al. 2025)
    """
    if mode == "token_mean":
        return token_shares(mask_T)
    tokens_B = torch.bincount(rows_T[mask_T])
    sequences = tokens_B.count_nonzero().clamp(min=1).double()
    match mode:
        case "sequence_mean_token_sum":
            weights_T = (1 / sequences).expand(len(mask_T))
        case "sequence_mean_token_mean":
            weights_T = torch.zeros(len(mask_T), dtype=torch.float64)
            weights_T[mask_T] = 1 / (sequences * tokens_B[rows_T[mask_T]])
        case "fixed_length":
            weights_T = (1 / (sequences * max_response_tokens)).expand(len(mask_T))
    return (weights_T * mask_T).float()


def token_shares(mask_T: torch.Tensor) -> torch.Tensor:
    """1 / N on the N trained tokens, 0 elsewhere; float32 `[T]`. sum(shares * x) is the token mean of x."""
    return (mask_T.double() / mask_T.count_nonzero().clamp(min=1)).float()
