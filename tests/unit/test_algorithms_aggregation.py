"""Token weights, by hand."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithms.token_weights import token_weights

# Three rows of 3, 1 and 2 tokens; row 1 is not trained on, row 2 only on its second token.
ROWS = torch.tensor([0, 0, 0, 1, 2, 2])
MASK = torch.tensor([True, True, True, False, False, True])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 4, 1 / 4, 1 / 4, 0, 0, 1 / 4]),
        ("sequence_mean_token_sum", [1 / 2, 1 / 2, 1 / 2, 0, 0, 1 / 2]),
        ("sequence_mean_token_mean", [1 / 6, 1 / 6, 1 / 6, 0, 0, 1 / 2]),
        ("fixed_length", [1 / 20, 1 / 20, 1 / 20, 0, 0, 1 / 20]),
    ],
)
def test_weights(mode, expected):
    torch.testing.assert_close(token_weights(mode, MASK, ROWS, 10), torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"])
def test_weights_of_a_step_without_trained_tokens_are_zero(mode):
    assert token_weights(mode, torch.zeros(6, dtype=torch.bool), ROWS, 10).tolist() == [0.0] * 6
    assert token_weights(mode, torch.zeros(0, dtype=torch.bool), ROWS[:0], 10).tolist() == []


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"])
def test_weights_follow_their_rows(mode):
    """Row numbers are labels: another order, or gaps between them, change nothing."""
    order = torch.tensor([5, 3, 0, 4, 2, 1])
    moved = token_weights(mode, MASK[order], 7 - 2 * ROWS[order], 10)
    assert torch.equal(moved, token_weights(mode, MASK, ROWS, 10)[order])
