"""Losses on pairs: the papers' equations, and their slopes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tandem.algorithms.preference import BradleyTerryLoss, DPOLoss, LinearScoreLoss, PairBatch, preference_loss
from tandem.batching.packing import rated_to_batch
from tandem.config.algorithms import PreferenceConfig
from tandem.types import Demonstration, Outputs, RatedAnswer, TokenColumns

ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
"""Two pairs: answers of 3 and 2 tokens, and of 1 and 3, of which the middle one is a user's."""
MASK = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
SCORES = torch.tensor([-0.5, -1.0, -0.25, -2.0, -0.5, -1.5, -0.75, -9.0, -0.25])
REFERENCE = torch.tensor([-1.0, -1.0, -1.0, -1.5, -0.5, -1.0, -1.0, -9.0, -1.0])
# Log-probs over the reference: pair 0: 1.25 and -0.5; pair 1: -0.5 and 1.0.


def pairs(margins=(0.0, 0.0), reference: torch.Tensor | None = REFERENCE) -> PairBatch:
    return PairBatch(ROWS, MASK, torch.tensor(margins), reference)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def loss(**config) -> DPOLoss:
    return DPOLoss(PreferenceConfig(**config))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"beta": 0.4}, [-log_sigmoid(0.4 * 1.75), -log_sigmoid(0.4 * -1.5)]),
        (
            {"beta": 0.4, "label_smoothing": 0.1},
            [-0.9 * log_sigmoid(0.7) - 0.1 * log_sigmoid(-0.7), -0.9 * log_sigmoid(-0.6) - 0.1 * log_sigmoid(0.6)],
        ),
        (
            {"beta": 0.4, "length_normalized": True},
            [-log_sigmoid(0.4 * (1.25 / 3 + 0.25)), -log_sigmoid(0.4 * (-0.5 - 0.5))],
        ),
        ({"loss": "ipo", "beta": 0.5}, [(1.25 / 3 + 0.25 - 1) ** 2, (-0.5 - 0.5 - 1) ** 2]),
    ],
)
def test_dpo_and_its_kin_by_hand(config, expected):
    slopes, metrics = loss(**config)(SCORES, pairs())
    assert metrics["loss"] == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert metrics["accuracy"] == 0.5 and slopes[7] == 0
    assert (slopes[:3] < 0).all() and (slopes[3:5] > 0).all()  # at the chosen tokens downhill is up


def test_simpo_by_hand():
    """Mean log-probs: -1.75 / 3 and -1.25; -1.5 and -0.5."""
    _, metrics = loss(loss="simpo", beta=2, target_margin=0.6)(SCORES, pairs(reference=None))
    margins = [2 * (-1.75 / 3 + 1.25), 2 * (-1.5 + 0.5)]
    assert metrics["loss"] == pytest.approx(-sum(log_sigmoid(margin - 0.6) for margin in margins) / 2, rel=1e-6)
    assert metrics["margin"] == pytest.approx(sum(margins) / 2)


def test_orpo_by_hand():
    """Mean probabilities of pair 0: exp(-1.75 / 3) and exp(-1.25); of pair 1: exp(-1.5) and exp(-0.5)."""
    slopes, metrics = preference_loss(PreferenceConfig(loss="orpo", beta=0.5))(SCORES, pairs(reference=None))
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-1.75 / 3, -1.25, -1.5, -0.5)]
    ratios = [math.log(odds[0] / odds[1]), math.log(odds[2] / odds[3])]
    likelihood = (0.5 + 1 + 0.25 + 1.5) / 4  # of the chosen answers' tokens
    expected = likelihood - 0.5 * sum(log_sigmoid(ratio) for ratio in ratios) / 2
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["margin"] == pytest.approx(sum(ratios) / 2, rel=1e-6)
    assert (slopes[:3] < 0).all() and (slopes[3:5] > 0).all()


def test_orpo_of_a_certain_answer_is_finite():
    certain = torch.where(ROWS == 0, 0.0, SCORES)
    slopes, metrics = preference_loss(PreferenceConfig(loss="orpo"))(certain, pairs(reference=None))
    assert math.isfinite(metrics["loss"]) and slopes.isfinite().all()


@pytest.mark.parametrize(("moved", "kl"), [(0.0, (-0.5 + 1.0) / 2), (-3.0, 0.0)])
def test_kto_by_hand(moved: float, kl: float):
    """Answers' log-probs over the reference: 1.25, which is good, and -0.5, bad; mismatched ones: -0.5 and 1.0."""
    config = PreferenceConfig(loss="kto", beta=0.4, desirable_weight=0.75, undesirable_weight=1.25)
    scores = SCORES + moved * (ROWS == 3)
    rated = PairBatch(ROWS, MASK, torch.zeros(2), REFERENCE, torch.tensor([True, False]))
    slopes, metrics = preference_loss(config)(scores, rated)
    good, bad = (1 / (1 + math.exp(-0.4 * x)) for x in (1.25 - kl, kl + 0.5))
    assert metrics["loss"] == pytest.approx((0.75 * (1 - good) + 1.25 * (1 - bad)) / 2, rel=1e-6)
    assert not slopes[ROWS % 2 == 1].any()  # the KL has no gradient
    expected = [-0.75 * 0.4 * good * (1 - good) / 2] * 3 + [1.25 * 0.4 * bad * (1 - bad) / 2]
    torch.testing.assert_close(slopes[[0, 1, 2, 5]], torch.tensor(expected))


def test_rated_answers_are_paired_with_the_answer_before():
    """Cut where prompt and other answer have more than `max_tokens` tokens."""
    rows = [
        RatedAnswer(
            Demonstration(row, np.array([row], np.int32), np.full(length, 10 + row, np.int32), np.ones(length, bool)),
            desirable=True,
        )
        for row, length in enumerate((1, 2, 4))
    ]
    batch = rated_to_batch(rows, max_tokens=4)
    assert batch.prompt_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.response_ids.tolist() == [10, 12, 12, 12, 11, 11, 10, 12, 12, 12, 12, 11, 11]
    assert np.diff(batch.response_offsets).tolist() == [1, 3, 2, 1, 4, 2]


def test_slopes_of_dpo_by_hand():
    """d loss / d log-prob = -beta sigmoid(-beta h) / pairs at a chosen token, the opposite at a rejected one."""
    slopes, _ = loss(beta=0.4)(SCORES, pairs())
    first, second = (0.4 / (1 + math.exp(x)) / 2 for x in (0.7, -0.6))
    torch.testing.assert_close(slopes, torch.tensor([-first] * 3 + [first] * 2 + [-second, second, 0, second]))


def test_bradley_terry_by_hand():
    """Scores at the last tokens: 1 and 0.5, -1 and 1; the second pair's margin is 0.5."""
    last = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    scores = torch.tensor([9.0, 9, 1, 9, 0.5, -1, 9, 9, 1])
    slopes, metrics = BradleyTerryLoss()(scores, PairBatch(ROWS, last, torch.tensor([0.0, 0.5])))
    assert metrics["loss"] == pytest.approx(-(log_sigmoid(0.5) + log_sigmoid(-2.5)) / 2)
    assert metrics["margin"] == pytest.approx((0.5 - 2) / 2) and metrics["accuracy"] == 0.5
    first, second = (1 / (1 + math.exp(x)) / 2 for x in (0.5, -2.5))
    torch.testing.assert_close(slopes, torch.tensor([0, 0, -first, 0, first, -second, 0, 0, second]))


def test_descending_the_slopes_is_descending_the_loss():
    """Scores come of parameters; the gradient through LinearScoreLoss is that of the pairs' loss itself."""
    weights = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    scores = weights.sigmoid().sum(1)
    chosen, rejected = pairs().by_row(scores - REFERENCE)
    (expected,) = torch.autograd.grad(-logsigmoid(0.3 * (chosen - rejected)).mean(), weights, retain_graph=True)
    slopes, _ = loss(beta=0.3)(scores.detach(), pairs())
    value, metrics = LinearScoreLoss()(Outputs(scores), TokenColumns(loss_weights=slopes))
    torch.testing.assert_close(torch.autograd.grad(value, weights)[0], expected, rtol=1e-6, atol=1e-8)
    assert metrics == {}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "are of loss: dpo, not of ipo"),
        ({"target_margin": 1.0}, "target_margin is of loss: simpo, not of dpo"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
    ],
)
def test_senseless_settings_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        PreferenceConfig(**config)
