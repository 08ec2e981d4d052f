"""Every policy loss: the papers' equations in plain float64 loops, gradients by hand, and what a cut may not change."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Rollouts
from tandem.algorithms.covariance import covariances
from tandem.algorithms.policy_gradient import make_loss
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.algorithms import AlgorithmConfig, KLConfig, PolicyGradientConfig
from tandem.types import Outputs, TokenColumns

ROWS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3])
"""Four responses; row 1 has one token."""
TOKENS = len(ROWS)
CONFIGS = {
    "clip": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": 1.5},
    "reinforce": {},
    "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.5},
    "dppo": {"max_divergence": 0.1, "max_ratio": 1.2},
    "dppo kl": {"divergence": "kl", "max_divergence": 0.02},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "gmpo": {"clip_log_ratio": 0.2},
    "kl_cov": {"share": 0.3, "coefficient": 0.7},
    "clip_cov": {"share": 0.2, "covariance_low": 0.0},
}


def loss_of(name: str, **algorithm) -> PolicyLoss:
    loss = {"type": name.split()[0], **CONFIGS[name]}
    return make_loss(PolicyGradientConfig(type="mine", minibatches=2, loss=loss, **algorithm))


def tokens(by_row: bool = True) -> tuple[Outputs, TokenColumns]:
    """Ten tokens in float64, one advantage a row; the third and the eighth are selected."""
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(TOKENS, generator=generator, dtype=torch.float64) * 2 - 0.05
    logprobs = (old + torch.randn(TOKENS, generator=generator, dtype=torch.float64) * 0.4).clamp(max=-0.01)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)[ROWS]
    if not by_row:
        advantages = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    selected = torch.zeros(TOKENS, dtype=torch.bool)
    selected[[2, 7]] = True
    weights = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)[ROWS] / torch.bincount(ROWS)[ROWS]
    columns = TokenColumns(
        old_logprobs=old,
        rollout_logprobs=old + 0.05,
        advantages=advantages,
        loss_weights=weights,
        shares=torch.full((TOKENS,), 1 / TOKENS, dtype=torch.float64),
        selected=selected,
        trajectories=ROWS,
    )
    return Outputs(logprobs.requires_grad_(), torch.ones(TOKENS, dtype=torch.float64)), columns


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def dppo(name: str, advantage: float, new: float, sampled: float) -> float:
    """-A M min(r, max_ratio)."""
    mu, pi, options = math.exp(sampled), math.exp(new), CONFIGS[name]
    distance = abs(mu - pi)
    if "kl" in name:
        distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    away = pi > mu if advantage > 0 else pi < mu
    if away and distance > options["max_divergence"]:
        return 0.0
    return -advantage * min(pi / mu, options.get("max_ratio", 20.0))


def equation(name: str, outputs: Outputs, columns: TokenColumns) -> list[float]:  # noqa: C901
    """Each token's term, from the papers."""
    new, old, advantages = (x.tolist() for x in (outputs.logprobs_S, columns.old_logprobs, columns.advantages))
    selected, terms = columns.selected.tolist(), []
    for t, advantage in enumerate(advantages):
        ratio = math.exp(new[t] - old[t])
        row = [s for s in range(TOKENS) if ROWS[s] == ROWS[t]]
        match name.split()[0]:
            case "clip":
                term = ppo(ratio, advantage, 0.2, 0.28)
                terms.append(min(term, -1.5 * advantage) if advantage < 0 else term)
            case "reinforce":
                terms.append(-advantage * new[t])
            case "cispo":
                terms.append(-clip(ratio, 0.9, 1.2) * advantage * new[t])
            case "sapo":
                temperature = 1.0 if advantage > 0 else 1.5
                terms.append(-advantage * 4 / temperature / (1 + math.exp(-temperature * (ratio - 1))))
            case "dppo":
                terms.append(dppo(name, advantage, new[t], old[t] + 0.05))
            case "gspo":
                sequence_ratio = math.exp(sum(new[s] - old[s] for s in row) / len(row))
                terms.append(ppo(sequence_ratio, advantage, 0.05, 0.1))
            case "gmpo":
                logs = [new[s] - old[s] for s in row]
                logs = [min(x, 0.2) if advantage > 0 else max(x, -0.2) for x in logs]
                terms.append(-advantage * math.exp(sum(logs) / len(row)))
            case "kl_cov":
                terms.append(-advantage * ratio + (0.7 * abs(new[t] - old[t]) if selected[t] else 0))
            case "clip_cov":
                terms.append(0.0 if selected[t] else ppo(ratio, advantage, 0.2, 0.2))
    return terms


@pytest.mark.parametrize("name", CONFIGS)
def test_value_against_the_equation(name):
    outputs, columns = tokens()
    found, metrics = loss_of(name)(outputs, columns)
    terms = equation(name, outputs, columns)
    expected = sum(weight * term for weight, term in zip(columns.loss_weights.tolist(), terms, strict=True))
    assert found.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["actor/pg_loss"].item() == found.item() and not metrics["actor/pg_loss"].requires_grad
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["clip", "sapo", "gmpo", "kl_cov", "clip_cov", "reinforce"])
def test_gradient_is_that_of_the_value(name):
    outputs, columns = tokens()
    loss = loss_of(name)
    assert torch.autograd.gradcheck(lambda x: loss(Outputs(x, outputs.entropy_S), columns)[0], (outputs.logprobs_S,))


@pytest.mark.parametrize("name", ["cispo", "dppo", "gspo"])
def test_gradient_where_a_factor_has_none(name):
    """d term / d log pi = -A times the weight of the token: clipped ratio, masked ratio, sequence ratio."""
    outputs, columns = tokens()
    loss_of(name)(outputs, columns)[0].backward()
    new, old = outputs.logprobs_S.detach(), columns.old_logprobs
    ratio = (new - old).exp()
    if name == "cispo":
        weight = ratio.clamp(0.9, 1.2)
    elif name == "dppo":
        advantages = columns.advantages.tolist()
        terms = [dppo("dppo", a, n, o) for a, n, o in zip(advantages, new.tolist(), (old + 0.05).tolist(), strict=True)]
        weight = -torch.tensor(terms, dtype=torch.float64) / columns.advantages
        assert (weight == 0).any() and (weight == 1.2).any()
    else:
        sequence = torch.stack([(new - old)[row == ROWS].mean() for row in range(4)]).exp()[ROWS]
        clipped = torch.where(columns.advantages > 0, sequence > 1.1, sequence < 0.95)
        weight = sequence * ~clipped
        assert clipped.any() and not clipped.all()
    torch.testing.assert_close(outputs.logprobs_S.grad, -columns.loss_weights * columns.advantages * weight)


def test_gspo_has_the_sequence_forms_gradient_where_a_row_has_one_advantage():
    """Equation 5: the gradient of s = exp(mean log ratio) itself, weights of a row being equal."""
    outputs, columns = tokens()
    loss_of("gspo")(outputs, columns)[0].backward()
    logprobs = outputs.logprobs_S.detach().requires_grad_()
    total = 0.0
    for row in range(4):
        own = row == ROWS
        ratio, advantage = (logprobs - columns.old_logprobs)[own].mean().exp(), columns.advantages[own][0]
        clipped = ratio.clamp(0.95, 1.1)
        total = total - columns.loss_weights[own].sum() * torch.minimum(ratio * advantage, clipped * advantage)
    total.backward()
    torch.testing.assert_close(outputs.logprobs_S.grad, logprobs.grad)


def test_gspo_weighs_tokens_of_one_row_apart():
    """The token form with advantages of their own (equation 13)."""
    outputs, columns = tokens(by_row=False)
    found, _ = loss_of("gspo")(outputs, columns)
    expected = sum(
        w * t for w, t in zip(columns.loss_weights.tolist(), equation("gspo", outputs, columns), strict=True)
    )
    assert found.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_on_fresh_trajectories_the_gradient_is_the_policy_gradient(name):
    """Without old log-probs the ratio is 1, and every loss descends -A log pi, but for tokens taken out."""
    outputs, columns = tokens()
    columns.old_logprobs, columns.rollout_logprobs = None, outputs.logprobs_S.detach()
    loss_of(name)(outputs, columns)[0].backward()
    kept = ~columns.selected if name == "clip_cov" else torch.ones(TOKENS)
    torch.testing.assert_close(outputs.logprobs_S.grad, -columns.loss_weights * columns.advantages * kept)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_metrics_add_up_over_micro_batches(name):
    """Rows may be spread over micro-batches in any way, and tokens too where the loss is token-local."""
    loss = loss_of(name, entropy_coefficient=0.1, kl=KLConfig(place="loss", estimator="k3+", coefficient=0.2))
    outputs, columns = tokens()
    columns.ref_logprobs = columns.old_logprobs - 0.3
    whole, metrics = loss(outputs, columns)
    (gradient,) = torch.autograd.grad(whole, outputs.logprobs_S)
    parts = [[8, 9, 0, 1, 2], [3], [4, 5, 6, 7]]
    if loss.token_local:
        parts = [[0], [1, 9, 4], [2, 3], [5, 8], [6, 7]]
    cut = []
    for part in map(torch.tensor, parts):
        own = Outputs(outputs.logprobs_S[part], outputs.entropy_S[part])
        mine = columns.map(lambda column, part=part: column[part])
        mine.trajectories = mine.trajectories.unique(return_inverse=True)[1]
        cut.append(loss(own, mine))
    total = sum(value for value, _ in cut)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, outputs.logprobs_S)[0], gradient)
    for metric, value in metrics.items():
        torch.testing.assert_close(sum(part[metric] for _, part in cut), value)


def batch(seed: int = 0) -> Rollouts:
    """100 trained tokens between 100 others; rewards 0 … 9 in two groups."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(10).repeat_interleave(20)
    mask = torch.arange(200) % 2 == 0
    logprobs = -torch.rand(200, generator=generator) * 5
    return Rollouts(torch.arange(10.0), torch.ones(10).bool(), torch.arange(10) // 5, rows, mask, logprobs, seed=seed)


def selected(loss: dict, seed: int = 0) -> tuple[list[int], list[float]]:
    """Places of the selected tokens among the trained ones, and the covariance of each trained one."""
    config = TypeAdapter(AlgorithmConfig).validate_python({"type": "grpo", "minibatches": 2, "loss": loss})
    found = make_algorithm(config, 8).advantages(batch(seed))
    assert not found.selected_T[~batch().mask_T].any()
    return found.selected_T[batch().mask_T].nonzero().flatten().tolist(), covariances(
        batch(), found.advantages_T
    ).tolist()


def test_covariances_by_hand():
    """Log-probs -1, -3 (mean -2) and advantages 2, 0 (mean 1)."""
    mask = torch.tensor([True, False, True])
    given = Rollouts(
        torch.ones(1), torch.ones(1).bool(), torch.zeros(1), torch.zeros(3), mask, torch.tensor([-1.0, 7, -3])
    )
    assert covariances(given, torch.tensor([2.0, 9.0, 0.0])).tolist() == [1.0, 1.0]


def test_kl_cov_selects_the_highest_covariances():
    places, every = selected({"type": "kl_cov", "share": 0.07})
    assert sorted(places) == sorted(sorted(range(100), key=lambda place: -every[place])[:7])
    assert len(selected({"type": "kl_cov", "share": 0.0001})[0]) == 1


def test_clip_cov_draws_within_the_bounds():
    loss = {"type": "clip_cov", "share": 0.05, "covariance_low": 0.5, "covariance_high": 2.0}
    places, every = selected(loss)
    within = [place for place in range(100) if 0.5 < every[place] < 2.0]
    assert len(places) == 5 and set(places) < set(within)
    assert selected(loss)[0] == places and selected(loss, seed=1)[0] != places
    assert selected({**loss, "covariance_low": 90.0, "covariance_high": 99.0})[0] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_without_an_advantage_need_no_pass_where_their_gradient_is_zero(name):
    loss = loss_of(name)
    outputs, columns = tokens()
    columns.advantages = torch.zeros(TOKENS, dtype=torch.float64)
    loss(outputs, columns)[0].backward()
    assert loss.zero_without_advantage == (not outputs.logprobs_S.grad.any())
