"""What happens to rewards before they become advantages: normalising, punishing length, placing them on tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class RunningMoments:
    """Mean and standard deviation of all rewards of a run so far, by Chan et al. 1979; plain numbers, float64."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances of the rewards from their mean."""

    def update(self, rewards: Tensor) -> None:
        """Take in rewards of one step, if there are any."""
        if len(rewards) == 0:
            return
        count = self.count + len(rewards)
        shift = rewards.mean().item() - self.mean
        within = (rewards - rewards.mean()).square().sum().item()
        between = shift**2 * self.count * len(rewards) / count
        self.mean += shift * len(rewards) / count
        self.squares += within + between
        self.count = count

    def normalize(self, rewards_B: Tensor) -> Tensor:
        """The rewards minus the mean, over the sample's standard deviation."""
        std = (self.squares / max(self.count - 1, 1)) ** 0.5
        return (rewards_B - self.mean) / (std + 1e-8)


def overlong_penalty(lengths_B: Tensor, max_response_tokens: int, buffer_tokens: float) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, equation 13).

    0 up to the buffer, which is the last `buffer_tokens` before `max_response_tokens`; in it, falling to -1 at its end.
    """
    return ((max_response_tokens - buffer_tokens - lengths_B) / buffer_tokens).clamp(-1, 0)


def longest_branches(trajectories_T: Tensor, branches_T: Tensor, rows: int) -> Tensor:
    """int64 `[B]`: tokens of each trajectory's longest branch, each of which has at most `max_response_tokens`."""
    lengths_T = branches_T.bincount()[branches_T]
    return trajectories_T.new_zeros(rows).scatter_reduce(0, trajectories_T, lengths_T, "amax")


def earned_so_far(turn_rewards_T: Tensor, mask_T: Tensor, trajectories_T: Tensor) -> Tensor:
    """What the turns of its trajectory have earned up to each policy token, the token's own turn included where the
    token is its last; branches one after another. float64 `[T]`, 0 outside the mask."""
    import torch

    trajectories_A, rewards_A = trajectories_T[mask_T], turn_rewards_T[mask_T].double()
    total_A = rewards_A.cumsum(0)
    starts_A = torch.searchsorted(trajectories_A, trajectories_A)
    earned_T = torch.zeros(len(mask_T), dtype=torch.float64)
    earned_T[mask_T] = total_A - (total_A - rewards_A)[starts_A]
    return earned_T


def reward_at_last_token(rewards_B: Tensor, mask_T: Tensor, trajectories_T: Tensor, branches_T: Tensor) -> Tensor:
    """The reward of each trajectory on the last policy token of each of its branches, 0 on all others; float32 `[T]`.

    So every policy token is followed by the reward once, in whichever branch of its trajectory it is.
    """
    import torch

    tokens_A = mask_T.nonzero().squeeze(1)
    branches_A = branches_T[tokens_A]
    last_of_branch_A = torch.searchsorted(branches_A, branches_A, right=True) - 1
    return torch.zeros(len(mask_T)).index_put((tokens_A[last_of_branch_A],), rewards_B[trajectories_T[tokens_A]])
