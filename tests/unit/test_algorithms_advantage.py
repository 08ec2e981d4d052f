"""Group statistics, GAE and whitening, by hand and against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.algorithms.group_relative import Siblings
from tandem.algorithms.returns import gae, masked_whiten
from tandem.algorithms.reward_shaping import reward_at_last_token


def test_group_statistics_leave_out_rows_without_a_reward():
    """Groups of three (one row lost), one, and two, their rows interleaved."""
    rewards = torch.tensor([1.0, 5.0, 4.0, 0.0, 0.0, 2.0])
    scored = torch.tensor([True, True, True, False, True, True])
    groups = torch.tensor([9, 3, 9, 9, 70, 70])
    siblings = Siblings(scored, groups)
    mean, std = siblings.mean(rewards), siblings.std(rewards)
    assert mean.tolist() == [2.5, 5.0, 2.5, 2.5, 1.0, 1.0]
    expected = [4.5**0.5, 0.0, 4.5**0.5, 4.5**0.5, 2**0.5, 2**0.5]
    torch.testing.assert_close(std, torch.tensor(expected, dtype=torch.float64))


def test_equal_rewards_are_centred_to_exactly_zero():
    rewards = torch.full((7,), 0.1)
    siblings = Siblings(torch.ones(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64))
    assert torch.equal(rewards - siblings.mean(rewards), torch.zeros(7, dtype=torch.float64))
    assert not siblings.std(rewards).any()


def test_reward_lies_on_the_last_policy_token():
    """Row 0 ends in a tool's answer, row 1 is not trained on, row 2 is empty."""
    mask = torch.tensor([True, True, False, False, False, True])
    rows = torch.tensor([0, 0, 0, 1, 1, 3])
    placed = reward_at_last_token(torch.tensor([0.5, 7.0, 7.0, -1.0]), mask, rows, rows)
    assert placed.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, -1.0]


def test_reward_lies_at_the_end_of_every_branch():
    mask = torch.tensor([True, True, False, True, True])
    rows, branches = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 2])
    placed = reward_at_last_token(torch.tensor([0.5, 2.0]), mask, rows, branches)
    assert placed.tolist() == [0.0, 0.5, 0.0, 0.5, 2.0]


def test_gae_by_hand():
    """gamma = lambda = 1/2, one row.

    Deltas: 0 + 0.5 * 1 - 0 = 0.5; 0 + 0.5 * 0.5 - 1 = -0.75; 1 + 0 - 0.5 = 0.5; from there back, a quarter each step.
    """
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([0.0, 1.0, 0.5]),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.int64),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages.tolist() == [0.5 + (-0.75 + 0.5 / 4) / 4, -0.75 + 0.5 / 4, 0.5]
    assert returns.tolist() == [advantages[0].item(), advantages[1].item() + 1, 1.0]


def test_gae_jumps_over_tokens_the_policy_did_not_make():
    """With a tool's three tokens in the middle the result is that of the policy's tokens alone."""
    rewards, values = torch.tensor([0.1, 0.0, 1.0]), torch.tensor([0.3, 0.2, 0.6])
    options = {"gamma": 0.9, "gae_lambda": 0.8}
    alone = gae(rewards, values, torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), **options)
    where = torch.tensor([0, 1, 5])
    mask = torch.zeros(6, dtype=torch.bool).index_fill(0, where, True)
    wide_values = torch.full((6,), 77.0).index_copy(0, where, values)
    wide = gae(torch.zeros(6).index_copy(0, where, rewards), wide_values, mask, torch.zeros(6).long(), **options)
    for whole, part in zip(wide, alone, strict=True):
        assert torch.equal(whole[where], part) and not whole[~mask].any()


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_of_ragged_rows_against_a_plain_loop(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(3)
    lengths = [4, 1, 0, 9, 3]
    rows = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    rewards, values = torch.randn(2, 17, generator=generator)
    mask = torch.rand(17, generator=generator) < 0.7
    expected, following = [0.0] * 17, {}
    for t in reversed(range(17)):
        if mask[t]:
            next_value, next_advantage = following.get(int(rows[t]), (0.0, 0.0))
            delta = rewards[t].item() + gamma * next_value - values[t].item()
            expected[t] = delta + gamma * gae_lambda * next_advantage
            following[int(rows[t])] = (values[t].item(), expected[t])
    advantages, returns = gae(rewards, values, mask, rows, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantages, torch.tensor(expected))
    torch.testing.assert_close(returns, (advantages + values) * mask)


class LargestResult(TorchDispatchMode):
    """How many elements the largest tensor has that is made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))])
        return made


def test_the_memory_of_gae_is_that_of_the_tokens():
    """However long the longest row is; padded, these rows were 8 million elements."""
    lengths = torch.tensor([4000, *[1] * 2000])
    rows = torch.repeat_interleave(torch.arange(2001), lengths)
    rewards, values = torch.randn(2, 6000)
    with LargestResult() as largest:
        gae(rewards, values, torch.ones(6000, dtype=torch.bool), rows, gamma=0.99, gae_lambda=0.95)
    assert largest.elements == 2 * 6000, "advantages and returns"


def test_gae_without_tokens():
    none = torch.zeros(3, dtype=torch.bool)
    advantages, returns = gae(torch.ones(3), torch.ones(3), none, torch.zeros(3).long(), gamma=1.0, gae_lambda=1.0)
    assert not advantages.any() and not returns.any()


def test_whitening():
    """1, 3 and 5 have mean 3 and sample deviation 2."""
    mask = torch.tensor([True, False, True, True])
    whitened = masked_whiten(torch.tensor([1.0, 100.0, 3.0, 5.0]), mask)
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    assert masked_whiten(torch.full((4,), 0.1), mask).tolist() == [0.0] * 4
    assert masked_whiten(torch.ones(4), torch.tensor([True, False, False, False])).tolist() == [0.0] * 4
