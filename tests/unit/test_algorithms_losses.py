"""The policy's and the critic's losses: numbers by hand, gradients, and independence of how a step is cut."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.builtin.clip import ClipLossConfig
from tandem.algorithms.builtin.ppo import ValueLoss, explained_variance
from tandem.algorithms.policy_gradient import make_loss
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.supervised import NextTokenLoss
from tandem.config.algorithms import KLConfig, PolicyGradientConfig
from tandem.types import Outputs, TokenColumns

# Ratios and advantages of six tokens; the last one carries no weight.
RATIOS = torch.tensor([1.5, 0.5, 0.5, 1.5, 5.0, 9.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 2.0])
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.0])
SHARES = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
ENTROPY = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 100.0])
OLD = torch.full((6,), -3.0)


def policy_loss(low: float, high: float, dual_clip: float | None = None, **more) -> PolicyLoss:
    clip = ClipLossConfig(clip_ratio_low=low, clip_ratio_high=high, dual_clip=dual_clip)
    return make_loss(PolicyGradientConfig(type="mine", loss=clip, **more))


def columns(**more) -> TokenColumns[torch.Tensor]:
    return TokenColumns(
        **{"advantages": ADVANTAGES, "loss_weights": WEIGHTS, "shares": SHARES, "old_logprobs": OLD, **more}
    )


def outputs() -> Outputs[torch.Tensor]:
    return Outputs((OLD + RATIOS.log()).requires_grad_(), ENTROPY.clone().requires_grad_())


def test_clipped_surrogate_by_hand():
    """Upper bound 1.3, lower 0.8: tokens 0 (at 1.3) and 2 (at 0.8) are clipped and get no gradient."""
    out = outputs()
    loss, metrics = policy_loss(0.2, 0.3)(out, columns())
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * -1.3 + 0.2 * -0.5 + 0.3 * 0.8 + 0.4 * 1.5 + 0.5 * 5.0)
    torch.testing.assert_close(out.logprobs_S.grad, torch.tensor([0.0, 0.2 * -0.5, 0.0, 0.4 * 1.5, 0.5 * 5.0, 0.0]))
    assert out.entropy_S.grad is None
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "actor/pg_loss": loss.item(),
            "actor/entropy": 3.0,
            "actor/clip_fraction": 2 / 5,
            "actor/ppo_kl": -math.log(1.5 * 0.5 * 0.5 * 1.5 * 5.0) / 5,
            "actor/ratio/mean": 9.0 / 5,
        }
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    """At 3 only the ratio of 5 is over the bound; the token with a positive advantage and ratio 9 is not touched."""
    out = outputs()
    weighted = columns(loss_weights=torch.ones(6))
    loss, _ = policy_loss(0.2, 0.3, dual_clip=3.0)(out, weighted)
    loss.backward()
    assert loss.item() == pytest.approx(-1.3 - 0.5 + 0.8 + 1.5 + 3.0 - 2 * 1.3)
    assert out.logprobs_S.grad[4] == 0


def test_entropy_and_kl_terms():
    reference = OLD + RATIOS.log() + torch.tensor([0.5, 0.0, -0.5, 1.0, 0.1, 2.0])
    plain, _ = policy_loss(0.2, 0.3)(outputs(), columns())
    out = outputs()
    loss = policy_loss(0.2, 0.3, entropy_coefficient=0.01, kl=KLConfig(place="loss", coefficient=0.1, estimator="k2"))
    total, metrics = loss(out, columns(ref_logprobs=reference))
    total.backward()
    distances = [0.125, 0.0, 0.125, 0.5, 0.005]
    expected = plain.item() - 0.01 * (0.1 + 0.4 + 0.9 + 1.6 + 2.5)
    expected += 0.1 * sum(weight * kl for weight, kl in zip([0.1, 0.2, 0.3, 0.4, 0.5], distances, strict=True))
    assert total.item() == pytest.approx(expected)
    torch.testing.assert_close(out.entropy_S.grad, -0.01 * WEIGHTS)
    assert metrics["actor/kl"].item() == pytest.approx(sum(distances) / 5)
    assert metrics["actor/pg_loss"].item() == pytest.approx(plain.item())


def test_without_old_logprobs_the_gradient_is_the_plain_policy_gradient():
    out = outputs()
    loss, metrics = policy_loss(0.2, 0.2)(out, columns(old_logprobs=None))
    loss.backward()
    torch.testing.assert_close(out.logprobs_S.grad, -WEIGHTS * ADVANTAGES)
    assert metrics["actor/ratio/mean"].item() == pytest.approx(1.0) and metrics["actor/clip_fraction"] == 0


def test_absurd_ratios_keep_a_finite_gradient():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    extreme = TokenColumns(
        advantages=torch.tensor([1.0, -1.0]),
        loss_weights=torch.ones(2),
        shares=torch.full((2,), 0.5),
        old_logprobs=torch.full((2,), -200.0),
    )
    loss, _ = policy_loss(0.2, 0.2)(Outputs(logprobs, torch.ones(2)), extreme)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


def test_surrogate_against_the_equation_and_its_numeric_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    weights = torch.rand(40, generator=generator, dtype=torch.float64)
    loss = policy_loss(0.2, 0.28, dual_clip=3.0, entropy_coefficient=0.1, kl=KLConfig(place="loss", coefficient=0.2))
    fixed = TokenColumns(
        old_logprobs=old, advantages=advantages, loss_weights=weights, shares=weights, ref_logprobs=old - 1
    )

    def total(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return loss(Outputs(logprobs, entropy), fixed)[0]

    expected = 0.0
    for new, before, advantage, weight in zip(*(x.tolist() for x in (logprobs, old, advantages, weights)), strict=True):
        ratio, to_reference = math.exp(new - before), before - 1 - new
        objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        objective = max(objective, 3 * advantage) if advantage < 0 else objective
        kl = math.exp(to_reference) - 1 - to_reference
        expected += weight * (-objective - 0.1 * 2.0 + 0.2 * kl)
    entropy = torch.full((40,), 2.0, dtype=torch.float64)
    assert total(logprobs, entropy).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(total, (logprobs.requires_grad_(), entropy.requires_grad_()))


def test_value_loss_by_hand():
    """Clip 0.2. Token 0 moved 0.5 towards its return: the clipped error counts, without gradient; 1 moved away."""
    values = torch.tensor([0.5, -0.5, 0.1, 9.0], requires_grad=True)
    filled = TokenColumns(
        values=torch.zeros(4),
        returns=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        loss_weights=torch.tensor([0.5, 0.25, 0.25, 0.0]),
    )
    loss, metrics = ValueLoss(0.2)(Outputs(values_S=values), filled)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.8**2 + 0.25 * 1.5**2 + 0.25 * 0.9**2))
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.25 * -1.5, 0.25 * -0.9, 0.0]))
    assert {name: value.item() for name, value in metrics.items()} == {"critic/vf_loss": loss.item()}


def test_value_loss_without_a_clip():
    filled = TokenColumns(values=torch.zeros(2), returns=torch.ones(2), loss_weights=torch.tensor([0.5, 0.5]))
    loss, _ = ValueLoss(None)(Outputs(values_S=torch.tensor([0.5, 3.0])), filled)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.25 + 0.5 * 4.0))


def test_explained_variance():
    mask = torch.tensor([True, True, True, False])
    returns = torch.tensor([0.0, 1.0, 2.0, 50.0])
    assert explained_variance(returns + 7, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.ones(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(1 - 4)
    assert explained_variance(returns, torch.ones(4), mask) is None
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)) is None


EVERY_TERM = policy_loss(0.2, 0.28, dual_clip=3.0, entropy_coefficient=0.1, kl=KLConfig(place="loss", coefficient=0.2))


@pytest.mark.parametrize("loss", [EVERY_TERM, ValueLoss(0.2), NextTokenLoss()])
def test_losses_and_metrics_add_up_over_slices(loss):
    """Any cut of the tokens gives the same loss, metrics and gradients: so does any micro-batching."""
    generator = torch.Generator().manual_seed(1)
    names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "loss_weights", "shares")
    filled = TokenColumns(**{name: torch.randn(50, generator=generator, dtype=torch.float64) for name in names})
    out = Outputs(*torch.randn(3, 50, generator=generator, dtype=torch.float64).requires_grad_())
    inputs = [out.logprobs_S, out.entropy_S, out.values_S]
    whole, whole_metrics = loss(out, filled)
    whole_gradients = torch.autograd.grad(whole, inputs, allow_unused=True, materialize_grads=True)
    parts = [loss(out.slice(a, b), filled.slice(a, b)) for a, b in [(0, 1), (1, 20), (20, 20), (20, 50)]]
    total = torch.stack([part for part, _ in parts]).sum()
    gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradients, whole_gradients)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(torch.stack([metrics[name] for _, metrics in parts]).sum(), value)
