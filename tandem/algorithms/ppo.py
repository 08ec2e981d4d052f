"""Proximal Policy Optimization (Schulman et al. 2017): a critic's values are the baseline of every token.

Sums are float64, results float32 `[T]` and 0 outside the mask.
"""

import torch
from torch import Tensor

from tandem.algorithms.base import Advantages, Rollouts, Signal
from tandem.algorithms.losses import ValueLoss
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.config.algorithms import PPOConfig
from tandem.types import TokenLoss


class PPO(PolicyGradient[PPOConfig]):
    """Generalised advantage estimation, whitened over the tokens of the step; the critic learns the returns."""

    def __init__(self, config: PPOConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Signal.VALUES}
        self.value_loss: TokenLoss[Tensor] | None = ValueLoss(config.value_clip)

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        values_T, mask_T, config = rollouts.values_T, rollouts.mask_T, self.config
        assert values_T is not None
        advantages_T, returns_T = gae(rewards_T, values_T, mask_T, rollouts.rows_T, config.gamma, config.gae_lambda)
        explained = explained_variance(values_T, returns_T, mask_T)
        metrics = {} if explained is None else {"critic/vf_explained_var": explained}
        if config.whiten_advantages:
            advantages_T = masked_whiten(advantages_T, mask_T)
        return Advantages(advantages_T, returns_T, metrics)


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, rows_T: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): (advantages, returns).

        delta_t = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * lambda * advantage_{t+1}
        return_t = advantage_t + value_t

    t + 1 is the row's next policy token, whatever a tool said in between; after the last one the value is 0, on
    truncated rows too.
    """
    rows_K = rows_T[mask_T]
    lengths_B = torch.bincount(rows_K, minlength=1)
    time_K = torch.arange(len(rows_K)) - (lengths_B.cumsum(0) - lengths_B)[rows_K]  # place in the row
    rewards, values, advantages = torch.zeros(3, int(lengths_B.max()) + 1, len(lengths_B), dtype=torch.float64)
    rewards[time_K, rows_K] = rewards_T[mask_T].double()
    values[time_K, rows_K] = values_T[mask_T].double()
    deltas = rewards[:-1] + gamma * values[1:] - values[:-1]
    for t in reversed(range(len(deltas))):
        advantages[t] = deltas[t] + gamma * gae_lambda * advantages[t + 1]
    advantages_T, returns_T = torch.zeros(2, len(mask_T))
    advantages_T[mask_T] = advantages[time_K, rows_K].float()
    returns_T[mask_T] = (advantages + values)[time_K, rows_K].float()
    return advantages_T, returns_T


def masked_whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (n - 1 in the denominator) over the mask."""
    values = values_T[mask_T].double()
    whitened_T = torch.zeros(len(mask_T))
    if len(values) > 1:
        whitened_T[mask_T] = ((values - values.mean()) * (values.var() + 1e-8).rsqrt()).float()
    return whitened_T


def explained_variance(values_T: Tensor, returns_T: Tensor, mask_T: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the mask; None where the returns do not vary."""
    returns, values = returns_T[mask_T].double(), values_T[mask_T].double()
    if len(returns) == 0 or (variance := returns.var(correction=0)) == 0:
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()
