"""The covariance of log-prob and advantage, which says by how much a token lowers the entropy of the policy.

Cui et al. 2025, "The Entropy Mechanism", equation 10: (log pi - mean log pi) * (A - mean A), means over the step's
tokens. It is taken once a step, by the policy before it, so the choice does not depend on how the step is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.algorithms.base import Rollouts

if TYPE_CHECKING:
    from torch import Tensor


def covariances(rollouts: Rollouts, advantages_T: Tensor) -> Tensor:
    """The covariance of each trained token, float64 `[A]`."""
    assert rollouts.old_logprobs_T is not None
    advantages_A = advantages_T[rollouts.mask_T].double()
    logprobs_A = rollouts.old_logprobs_T[rollouts.mask_T].double()
    return (advantages_A - advantages_A.mean()) * (logprobs_A - logprobs_A.mean())


def share_of_tokens(share: float, covariance_A: Tensor) -> int:
    """How many tokens a share of them is, at least one if there are any."""
    return min(max(int(share * len(covariance_A)), 1), len(covariance_A))


def mark_tokens(mask_T: Tensor, chosen: Tensor) -> Tensor:
    """bool `[T]`: True on the trained tokens whose places among the trained ones are `chosen`."""
    marked_T = mask_T.new_zeros(len(mask_T))
    marked_T[mask_T.nonzero().squeeze(1)[chosen]] = True
    return marked_T
