"""KL estimators and the coefficient, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.grpo import GRPOConfig
from tandem.algorithms.kl import kl_estimate
from tandem.config.algorithms import KLConfig


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


def coefficients(kl: KLConfig, *steps: tuple[float, int]) -> list[float]:
    """The coefficient after each step of (mean token KL, trajectories)."""
    algorithm = make_algorithm(GRPOConfig(kl=kl), 8)
    found = []
    for observed_kl, rows in steps:
        algorithm.advantages(
            Rollouts(
                rewards_B=torch.zeros(rows),
                scored_B=torch.ones(rows, dtype=torch.bool),
                groups_B=torch.zeros(rows, dtype=torch.int64),
                trajectories_T=torch.arange(rows),
                mask_T=torch.ones(rows, dtype=torch.bool),
                old_logprobs_T=torch.zeros(rows),
                ref_logprobs_T=torch.full((rows,), -observed_kl),
            )
        )
        found.append(algorithm.state()["kl_coefficient"])
    return found


def test_adaptive_coefficient_follows_the_target():
    """Errors 0.1, -1 (cut at -0.2) and 17 (cut at 0.2); the last step counts for one horizon, not for ten."""
    adaptive = KLConfig(
        place="reward", control="adaptive", coefficient=0.1, target=0.5, horizon_trajectories=100, estimator="k1"
    )
    expected = [0.1 * (1 + 0.1 * 0.5), 0.105 * (1 - 0.2 * 0.1), 0.105 * 0.98 * 1.2]
    assert coefficients(adaptive, (0.55, 50), (0.0, 10), (9.0, 1000)) == pytest.approx(expected)


def test_fixed_coefficient_stays():
    assert coefficients(KLConfig(place="reward", coefficient=0.3), (9.0, 1000)) == [0.3]
