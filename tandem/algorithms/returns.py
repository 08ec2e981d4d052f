"""Rewards of single tokens -> advantages and returns of single tokens.

Sums are float64, results float32 `[T]` and 0 outside the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequences_T: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): (advantages, returns).

        delta_t = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * lambda * advantage_{t+1}
        return_t = advantage_t + value_t

    t + 1 is the sequence's next policy token, whatever a tool said in between; after the last one the value is 0, on
    truncated ones too. `sequences_T`: ascending, the branch of each token. Nothing runs from one branch into another:
    their contexts differ.
    """
    import torch

    rows_K = sequences_T[mask_T]
    lengths_B = rows_K.bincount(minlength=1)
    times_K = places_in_rows(rows_K)
    rewards, values, advantages = torch.zeros(3, int(lengths_B.max()) + 1, len(lengths_B), dtype=torch.float64)
    rewards[times_K, rows_K] = rewards_T[mask_T].double()
    values[times_K, rows_K] = values_T[mask_T].double()
    deltas = rewards[:-1] + gamma * values[1:] - values[:-1]
    for t in reversed(range(len(deltas))):
        advantages[t] = deltas[t] + gamma * gae_lambda * advantages[t + 1]
    advantages_T, returns_T = torch.zeros(2, len(mask_T))
    advantages_T[mask_T] = advantages[times_K, rows_K].float()
    returns_T[mask_T] = (advantages + values)[times_K, rows_K].float()
    return advantages_T, returns_T


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, sequences_T: Tensor, gamma: float) -> Tensor:
    """The sum of a token's reward and, discounted by gamma a policy token, all later ones of its sequence."""
    import torch

    _, returns_T = gae(rewards_T, torch.zeros(len(mask_T)), mask_T, sequences_T, gamma, gae_lambda=1.0)
    return returns_T


def places_in_rows(rows_K: Tensor) -> Tensor:
    """How many tokens of its row come before each token; `rows_K` is ascending."""
    import torch

    lengths_B = rows_K.bincount(minlength=1)
    starts_B = lengths_B.cumsum(0) - lengths_B
    return torch.arange(len(rows_K)) - starts_B[rows_K]


def masked_whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """The values with mean 0 and standard deviation 1 (n - 1 in the denominator) over the mask."""
    import torch

    values_K = values_T[mask_T].double()
    whitened_T = torch.zeros(len(mask_T))
    if len(values_K) > 1:
        whitened_T[mask_T] = ((values_K - values_K.mean()) * (values_K.var() + 1e-8).rsqrt()).float()
    return whitened_T
