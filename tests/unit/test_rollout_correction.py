"""Importance weights against numbers worked by hand, and against the gradient that they are meant to restore."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from tandem.algorithms.rollout_correction import rollout_weights
from tandem.config.algorithms import RolloutCorrectionConfig
from tandem.types import Outputs, TokenColumns
from tests.every_loss import KL_COEFFICIENT, every_loss

LOG_RATIOS = torch.tensor([log(3.0), log(0.5), 0.0, log(1.5), log(1.5), log(6.0)])
ROWS = torch.tensor([0, 0, 0, 1, 1, 1])
MASK = torch.tensor([True, True, False, True, True, True])


def weigh(**settings: object) -> list[float]:
    config = RolloutCorrectionConfig.model_validate(settings)
    rollout = torch.tensor([-1.0, -2.0, 5.0, -0.5, -0.1, -3.0])
    weights, _ = rollout_weights(config, rollout + LOG_RATIOS, rollout, MASK, ROWS)
    return weights.tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"type": "truncate"}, [2, 0.5, 1, 1.5, 1.5, 2]),
        ({"type": "mask"}, [0, 0.5, 1, 1.5, 1.5, 0]),
        ({"type": "mask", "lower": 0.6, "upper": 5}, [3, 0, 1, 1.5, 1.5, 0]),
        ({"type": "truncate", "level": "sequence", "upper": 10}, [1.5, 1.5, 1, 10, 10, 10]),
        ({"type": "mask", "level": "sequence", "upper": 10}, [1.5, 1.5, 1, 0, 0, 0]),
        ({"type": "truncate", "level": "geometric", "upper": 5}, [1.5**0.5] * 2 + [1] + [13.5 ** (1 / 3)] * 3),
        ({"type": "mask", "level": "geometric", "lower": 2, "upper": 5}, [0, 0, 1] + [13.5 ** (1 / 3)] * 3),
    ],
)
def test_weights(settings: dict[str, object], expected: list[float]) -> None:
    assert weigh(**settings) == pytest.approx(expected, rel=1e-5)


def test_metrics_count_what_is_beyond_the_bounds() -> None:
    rollout = torch.zeros(6)
    config = RolloutCorrectionConfig(type="mask", lower=0.6)
    _, metrics = rollout_weights(config, LOG_RATIOS, rollout, MASK, ROWS)
    assert metrics["rollout/correction_share"] == pytest.approx(3 / 5)
    assert metrics["rollout/correction_mean"] == pytest.approx((0 + 0 + 1.5 + 1.5 + 0) / 5)


def test_a_ratio_without_bounds_stays_a_number() -> None:
    config = RolloutCorrectionConfig(type="truncate", level="sequence", upper=1e9)
    weights, _ = rollout_weights(
        config, torch.full((4,), 100.0), torch.zeros(4), torch.ones(4) > 0, torch.zeros(4).long()
    )
    assert weights.tolist() == pytest.approx([exp(20)] * 4)


def test_untruncated_weights_restore_the_gradient_of_the_trainers_policy() -> None:
    """Of E_pi[reward], from draws of another policy: the mean over them approaches the exact one."""
    torch.manual_seed(0)
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0], requires_grad=True)
    engine = torch.tensor([1.0, -1.0, 0.0, 0.4]).log_softmax(0)
    rewards = torch.tensor([1.0, 0.0, -1.0, 2.0])
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    drawn = torch.multinomial(engine.exp(), 200_000, replacement=True)
    policy = logits.log_softmax(0)
    config = RolloutCorrectionConfig(type="truncate", upper=100)
    everything, rows = torch.ones(len(drawn)) > 0, torch.arange(len(drawn))
    weights, _ = rollout_weights(config, policy.detach()[drawn], engine[drawn], everything, rows)
    (corrected,) = torch.autograd.grad((weights * policy[drawn] * rewards[drawn]).mean(), logits, retain_graph=True)
    (naive,) = torch.autograd.grad((policy[drawn] * rewards[drawn]).mean(), logits)
    assert (corrected - exact).abs().max() < 0.01
    assert (naive - exact).abs().max() > 0.05


@pytest.mark.parametrize("name", every_loss())
def test_the_correction_leaves_kl_and_entropy_alone(name: str) -> None:
    """A token that the correction masks loses the gradient of its surrogate, and keeps those of its KL and entropy."""
    loss, weight = every_loss()[name], 0.25
    columns = {
        "loss_weights": torch.tensor([weight, weight]),
        "shares": torch.tensor([0.5, 0.5]),
        "advantages": torch.tensor([1.0, 1.0]),
        "old_logprobs": torch.tensor([-1.0, -2.0]),
        "rollout_logprobs": torch.tensor([-1.0, -2.0]),
        "ref_logprobs": torch.tensor([-1.5, -2.5]),
        "selected": torch.tensor([False, False]),
        "trajectories": torch.tensor([0, 1]),
    }

    def gradients(**more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.tensor([-1.1, -2.1], requires_grad=True)
        entropy = torch.tensor([0.7, 0.9], requires_grad=True)
        value, _ = loss(Outputs(logprobs_S=logprobs, entropy_S=entropy), TokenColumns(**columns, **more))
        by_logprob, by_entropy = torch.autograd.grad(value, [logprobs, entropy])
        return by_logprob, by_entropy

    plain, entropy_plain = gradients()
    masked, entropy_masked = gradients(importance_weights=torch.tensor([1.0, 0.0]))
    assert torch.equal(entropy_plain, entropy_masked) and (entropy_plain != 0).all()
    assert masked[0] == plain[0]
    k3_gradient = 1 - exp(-2.5 + 2.1)
    assert masked[1].item() == pytest.approx(weight * KL_COEFFICIENT * k3_gradient, rel=1e-4)
    assert abs(plain[1].item() - masked[1].item()) > 0.01


def test_bounds_that_leave_no_ratio_are_refused() -> None:
    with pytest.raises(ValueError, match="lower: 3 and upper: 2 leave no ratio"):
        RolloutCorrectionConfig(type="mask", lower=3, upper=2)
