"""Proximal Policy Optimization (Schulman et al. 2017): a critic's values are the baseline of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.returns import gae, masked_whiten
from tandem.config.algorithms import MayHaveCriticConfig
from tandem.config.base import PositiveInt, Share

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.types import Outputs, TokenColumns, TokenLoss


class PPOConfig(MayHaveCriticConfig):
    """Proximal Policy Optimization with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    advantages_by_token: ClassVar[bool] = True
    takes_turn_rewards: ClassVar[bool] = True

    type: Literal["ppo"] = "ppo"
    group_size: PositiveInt = 1
    gamma: Share = 1.0
    gae_lambda: Share = 1.0
    whiten_advantages: bool = True
    """Advantages of a step get mean 0 and standard deviation 1 over their tokens."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the rollout's within one step (null: free)."""


class PPO(PolicyGradient[PPOConfig]):
    """Generalised advantage estimation, whitened over the tokens of the step; the critic learns the returns."""

    def __init__(self, config: PPOConfig, max_response_tokens: int) -> None:
        super().__init__(config, max_response_tokens)
        self.needs |= {Need.VALUES}
        self.value_loss: TokenLoss[Tensor] | None = ValueLoss(config.value_clip)

    def estimate(self, rollouts: Rollouts, rewards_T: Tensor) -> Advantages:
        values_T, mask_T, config = rollouts.values_T, rollouts.mask_T, self.config
        assert values_T is not None
        advantages_T, returns_T = gae(rewards_T, values_T, mask_T, rollouts.branches_T, config.gamma, config.gae_lambda)
        explained = explained_variance(values_T, returns_T, mask_T)
        metrics = {} if explained is None else {"critic/vf_explained_var": explained}
        if config.whiten_advantages:
            advantages_T = masked_whiten(advantages_T, mask_T)
        return Advantages(advantages_T, returns_T, metrics)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the squared error to the returns, or if larger, that of the value clipped around the old one (PPO2).

    Columns: `values` (the old ones), `returns` and `loss_weights`.
    """

    value_clip: float | None

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: TokenColumns[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        values_S, old_S, returns_S = outputs.values_S, columns.values, columns.returns
        assert values_S is not None and old_S is not None and returns_S is not None and columns.loss_weights is not None
        squares_S = (values_S - returns_S).square()
        if self.value_clip is not None:
            clipped_S = old_S + (values_S - old_S).clamp(-self.value_clip, self.value_clip)
            squares_S = squares_S.maximum((clipped_S - returns_S).square())
        loss = (columns.loss_weights * squares_S).sum() / 2
        return loss, {"critic/vf_loss": loss.detach()}


def explained_variance(values_T: Tensor, returns_T: Tensor, mask_T: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the mask; None where the returns do not vary."""
    returns, values = returns_T[mask_T].double(), values_T[mask_T].double()
    if len(returns) == 0 or (variance := returns.var(correction=0)) == 0:
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()
