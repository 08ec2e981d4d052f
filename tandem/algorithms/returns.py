"""Rewards of single tokens -> advantages and returns of single tokens.

Sums are float64, results float32 `[T]` and 0 outside the mask.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, branches_T: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): (advantages, returns).

        delta_t = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * lambda * advantage_{t+1}
        return_t = advantage_t + value_t

    t + 1 is the branch's next policy token, whatever a tool said in between; after the last one the value is 0, on
    truncated ones too. `branches_T`: ascending, the branch of each token. Nothing runs from one branch into another:
    their contexts differ.
    """
    import torch

    rewards_A, values_A, rows_A = rewards_T[mask_T], values_T[mask_T], branches_T[mask_T]
    advantages_A = torch.empty_like(rewards_A, dtype=torch.float32)
    returns_A = torch.empty_like(advantages_A)
    for piece in _pieces(rows_A):
        values = values_A[piece].double()
        to_go = _tokens_to_go(rows_A[piece] - rows_A[piece.start])
        next_values = values.roll(-1).masked_fill_(to_go == 0, 0.0)
        deltas = rewards_A[piece].double() + gamma * next_values - values
        advantages = _discounted_sums(deltas, to_go, gamma * gae_lambda)
        advantages_A[piece] = advantages.float()
        returns_A[piece] = (advantages + values).float()
    advantages_T, returns_T = torch.zeros(2, len(mask_T))
    advantages_T[mask_T] = advantages_A
    returns_T[mask_T] = returns_A
    return advantages_T, returns_T


def _pieces(rows_A: Tensor, tokens: int = 1 << 20) -> list[slice]:
    """Slices of whole rows, of about so many tokens: what is computed of them in float64 is of this size."""
    numbers_A = rows_A.numpy()
    begins: list[int] = np.unique(np.searchsorted(numbers_A, numbers_A[::tokens])).tolist()
    return [slice(start, stop) for start, stop in pairwise([*begins, len(numbers_A)])]


def _tokens_to_go(rows_A: Tensor) -> Tensor:
    """int64 `[A]`: how many tokens of its row come after each token; `rows_A` is ascending."""
    import torch

    ends_B = rows_A.bincount(minlength=1).cumsum(0)
    return ends_B[rows_A] - 1 - torch.arange(len(rows_A))


def _discounted_sums(terms_A: Tensor, to_go_A: Tensor, factor: float) -> Tensor:
    """Each term plus `factor` times the next token's sum, from the end of each row; float64 `[A]`.

    All rows take a step at a time, their last tokens first. The tokens of a step lie side by side, those of the longest
    rows first, so that the rows which still go on are a slice of it: the memory is that of the tokens, however much the
    lengths of rows differ.
    """
    import torch

    is_last_A = to_go_A == 0
    row_A = is_last_A.cumsum(0) - is_last_A.long()
    lengths_B = row_A.bincount()
    place_of_row_B = torch.empty_like(lengths_B)
    place_of_row_B[lengths_B.argsort(descending=True)] = torch.arange(len(lengths_B))
    rows_of_step = to_go_A.bincount()
    starts_of_steps = rows_of_step.cumsum(0) - rows_of_step
    place_A = starts_of_steps[to_go_A] + place_of_row_B[row_A]
    sums = torch.empty_like(terms_A)
    sums[place_A] = terms_A
    by_step, before = sums.numpy(), 0
    starts = starts_of_steps.numpy()[1:].tolist()
    counts = rows_of_step.numpy()[1:].tolist()
    for start, rows in zip(starts, counts, strict=True):
        by_step[start : start + rows] += factor * by_step[before : before + rows]
        before = start
    return sums[place_A]


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, branches_T: Tensor, gamma: float) -> Tensor:
    """The sum of a token's reward and, discounted by gamma a policy token, all later ones of its branch."""
    import torch

    _, returns_T = gae(rewards_T, torch.zeros(len(mask_T)), mask_T, branches_T, gamma, gae_lambda=1.0)
    return returns_T


def places_in_rows(rows_A: Tensor) -> Tensor:
    """How many tokens of its row come before each token; `rows_A` is ascending."""
    import torch

    lengths_B = rows_A.bincount(minlength=1)
    starts_B = lengths_B.cumsum(0) - lengths_B
    return torch.arange(len(rows_A)) - starts_B[rows_A]


def masked_whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """The values with mean 0 and standard deviation 1 (n - 1 in the denominator) over the mask."""
    import torch

    values_A = values_T[mask_T].double()
    whitened_T = torch.zeros(len(mask_T))
    if len(values_A) > 1:
        whitened_T[mask_T] = ((values_A - values_A.mean()) * (values_A.var() + 1e-8).rsqrt()).float()
    return whitened_T
