"""GMPO with the importance weights of the rollout correction: the geometric mean that the paper's objective is."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.builtin.gmpo import GMPOConfig
from tandem.algorithms.policy_gradient import make_loss
from tandem.types import Outputs, TokenColumns

RATIOS = [[1.2, 0.9], [0.8]]
"""pi / old policy of a row of two tokens and a row of one."""
ADVANTAGES = [1.0, -2.0]
ROW_WEIGHTS = [[0.25, 0.25], [0.5]]
"""Two rows, each the mean of its tokens."""


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row]).double()


def loss_and_gradient(importance: list[list[float]] | None) -> tuple[float, list[float]]:
    logprobs = (flat(RATIOS).log() - 1).requires_grad_()
    columns = TokenColumns(
        old_logprobs=torch.full((3,), -1.0).double(),
        advantages=torch.tensor([ADVANTAGES[0], ADVANTAGES[0], ADVANTAGES[1]]).double(),
        loss_weights=flat(ROW_WEIGHTS),
        shares=torch.full((3,), 1 / 3).double(),
        trajectories=torch.tensor([0, 0, 1]),
        importance_weights=None if importance is None else flat(importance),
    )
    loss, _ = make_loss(GMPOConfig())(Outputs(logprobs, torch.zeros(3).double()), columns)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def test_the_weights_of_a_row_enter_by_their_geometric_mean():
    """Weights 0.5 and 2.0 cancel in a product, where their arithmetic mean would scale the row by 1.25."""
    first, second = -1.0 * math.sqrt(1.2 * 0.5 * 0.9 * 2.0), 2.0 * (0.8 * 0.7)
    loss, gradient = loss_and_gradient([[0.5, 2.0], [0.7]])
    assert loss == pytest.approx(0.5 * first + 0.5 * second)
    assert gradient == pytest.approx([0.25 * first, 0.25 * first, 0.5 * second])  # d exp(mean log r) = itself / n
    plain, _ = loss_and_gradient(None)
    assert 0.5 * first == pytest.approx(plain - 0.5 * 2.0 * 0.8), "the first row is as without weights"


def test_a_masked_token_leaves_the_product_and_the_loss():
    """Of the first row only the second token is left: ratio 0.9, weight 2, and half of the row's weight."""
    first = -1.0 * 0.9 * 2.0
    loss, gradient = loss_and_gradient([[0.0, 2.0], [1.0]])
    assert loss == pytest.approx(0.25 * first + 0.5 * 2.0 * 0.8)
    assert gradient == pytest.approx([0.0, 0.25 * first, 0.5 * 2.0 * 0.8])


def test_a_masked_row_is_gone():
    loss, gradient = loss_and_gradient([[0.0, 0.0], [1.0]])
    assert loss == pytest.approx(0.5 * 2.0 * 0.8) and gradient[:2] == [0.0, 0.0] and math.isfinite(gradient[2])


def test_weights_of_one_change_nothing():
    assert loss_and_gradient([[1.0, 1.0], [1.0]]) == loss_and_gradient(None)
