"""KL estimators and the coefficient, by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tandem.algorithms.kl import KLCoefficient, kl_estimate
from tandem.config.tree import KLConfig


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-math.log(2), 0.0, math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(4) ** 2 / 2]),
        ("k3", [2 - 1 - math.log(2), 0.0, 1 / 4 - 1 + math.log(4)]),
    ],
)
def test_estimators(estimator, expected):
    """Reference over policy: 2, 1 and 1/4."""
    policy = torch.tensor([0.25, 0.5, 0.8]).log()
    reference = torch.tensor([0.5, 0.5, 0.2]).log()
    torch.testing.assert_close(kl_estimate(estimator, policy, reference), torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    exact = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.1) + 0.1 * math.log(0.1 / 0.4)
    expectation = (policy * kl_estimate(estimator, policy.log(), reference.log())).sum().item()
    assert expectation == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_of_the_loss_term(estimator):
    """k2 descends KL(policy || reference), k3 KL(reference || policy), k1 nothing."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    policy = logprobs.exp().detach()
    (found,) = torch.autograd.grad((policy * kl_estimate(estimator, logprobs, reference.log())).sum(), logits)
    logprobs = logits.log_softmax(0)
    distance = {
        "k1": logits.sum() * 0,
        "k2": (logprobs.exp() * (logprobs - reference.log())).sum(),
        "k3": (reference * (reference.log() - logprobs)).sum(),
    }[estimator]
    torch.testing.assert_close(found, torch.autograd.grad(distance, logits)[0])


def test_k3_stays_finite_at_absurd_distances():
    policy = torch.tensor([-300.0], requires_grad=True)
    estimate = kl_estimate("k3", policy, torch.tensor([-1.0]))
    estimate.sum().backward()
    assert torch.isfinite(estimate).all() and torch.isfinite(policy.grad).all()


def test_adaptive_coefficient_follows_the_target():
    adaptive = KLConfig(place="reward", control="adaptive", coefficient=0.1, target=0.5, horizon_trajectories=100)
    coefficient = KLCoefficient(adaptive)
    coefficient.update(0.55, 50)
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    coefficient.update(0.0, 10)
    assert coefficient.value == pytest.approx(0.105 * (1 - 0.2 * 0.1))
    before = coefficient.value
    coefficient.update(9.0, 10_000)
    assert coefficient.value == pytest.approx(before * 1.2)


def test_coefficient_survives_a_restart():
    config = KLConfig(place="reward", control="adaptive")
    first, second = KLCoefficient(config), KLCoefficient(config)
    first.update(5.0, 128)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.value == first.value != config.coefficient


def test_fixed_coefficient_stays():
    coefficient = KLCoefficient(KLConfig(place="reward", coefficient=0.3))
    coefficient.update(100.0, 1000)
    assert coefficient.value == 0.3
