"""Rewards -> advantages: the parts. `_B` rows, `_T` response tokens of all rows, `_K` policy tokens among them.

Everything is computed in float64 and returned in float32: equal rewards then give advantages that are exactly 0.
"""

from __future__ import annotations

import torch


def row_sums(values_T: torch.Tensor, rows_T: torch.Tensor, rows: int) -> torch.Tensor:
    """Sum over the tokens of each row; `[B]`, float64."""
    return torch.zeros(rows, dtype=torch.float64).index_add_(0, rows_T, values_T.double())


def reward_at_last_token(rewards_B: torch.Tensor, mask_T: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
    """The reward of each row on its last policy token, 0 on all others; float32 `[T]`."""
    tokens_K = mask_T.nonzero().squeeze(1)
    last_K = _last_of_row(rows_T[tokens_K])
    rewards_T = torch.zeros(len(mask_T))
    rewards_T[tokens_K[last_K]] = rewards_B[rows_T[tokens_K[last_K]]]
    return rewards_T


def group_statistics(
    rewards_B: torch.Tensor, scored_B: torch.Tensor, groups_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, standard deviation) of the scored rewards in each row's group; two float64 `[B]`.

    The deviation is the sample's (n - 1 in the denominator), 0 in a group with fewer than two scored rows.
    """
    rows = len(groups_B)
    group_B = torch.searchsorted(groups_B.sort().values, groups_B)  # one number below `rows` for each group
    scored = scored_B.double()
    count_B = row_sums(scored, group_B, rows)[group_B]
    mean_B = row_sums(rewards_B * scored, group_B, rows)[group_B] / count_B.clamp(min=1)
    squares_B = row_sums((rewards_B - mean_B).square() * scored, group_B, rows)[group_B]
    return mean_B, (squares_B / (count_B - 1).clamp(min=1)).sqrt()


def gae(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    rows_T: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): (advantages, returns), float32 `[T]`.

        delta_t = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * lambda * advantage_{t+1}
        return_t = advantage_t + value_t

    t + 1 is the row's next policy token, whatever a tool said in between; after the last one the value is 0, on
    truncated rows too. Both are 0 outside the mask.
    """
    tokens_K = mask_T.nonzero().squeeze(1)
    rows_K, values_K = rows_T[tokens_K], values_T[tokens_K].double()
    next_values_K = values_K.roll(-1).masked_fill(_last_of_row(rows_K), 0.0)
    deltas_K = rewards_T[tokens_K].double() + gamma * next_values_K - values_K
    advantages_K = _discounted_sums(deltas_K, rows_K, gamma * gae_lambda)
    advantages_T, returns_T = torch.zeros(len(mask_T)), torch.zeros(len(mask_T))
    advantages_T[tokens_K] = advantages_K.float()
    returns_T[tokens_K] = (advantages_K + values_K).float()
    return advantages_T, returns_T


def masked_whiten(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 (n - 1 in the denominator) over the mask, 0 elsewhere; float32 `[T]`."""
    values = values_T[mask_T].double()
    whitened_T = torch.zeros(len(mask_T))
    if len(values) > 1:
        whitened_T[mask_T] = ((values - values.mean()) * (values.var() + 1e-8).rsqrt()).float()
    return whitened_T


def _last_of_row(rows_K: torch.Tensor) -> torch.Tensor:
    """bool: the token is the last of its row. Rows lie head to tail."""
    last_K = torch.ones(len(rows_K), dtype=torch.bool)
    last_K[:-1] = rows_K[1:] != rows_K[:-1]
    return last_K


def _discounted_sums(values_K: torch.Tensor, rows_K: torch.Tensor, discount: float) -> torch.Tensor:
    """out_t = values_t + discount * out_{t+1} within each row: a step for each token of the longest row."""
    lengths_B = torch.bincount(rows_K)
    if not len(lengths_B):
        return values_K
    time_K = torch.arange(len(rows_K)) - (lengths_B.cumsum(0) - lengths_B)[rows_K]
    sums = torch.zeros(int(lengths_B.max()), len(lengths_B), dtype=values_K.dtype)
    sums[time_K, rows_K] = values_K
    for time in range(len(sums) - 2, -1, -1):
        sums[time] += discount * sums[time + 1]
    return sums[time_K, rows_K]
