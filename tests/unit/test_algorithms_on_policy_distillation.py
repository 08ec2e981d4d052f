"""On-policy distillation: advantages by hand, the gradient against that of the KL written out, what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from tandem.algorithms.base import Need, Rollouts
from tandem.algorithms.builtin.on_policy_distillation import OnPolicyDistillation, OnPolicyDistillationConfig
from tandem.types import Outputs, TokenColumns

STUDENT = [-1.0, -0.5, -2.0, -0.1, -3.0]
TEACHER = [-0.5, -1.5, -2.0, -7.0, -1.0]
"""Two rows of one prompt: of three tokens, the last of which a tool said, and of two."""
MASK = [True, True, False, True, True]


def rollouts(scored: tuple[bool, bool] = (True, True)) -> Rollouts:
    trajectories_T = torch.tensor([0, 0, 0, 1, 1])
    scored_B = torch.tensor(scored)
    return Rollouts(
        rewards_B=torch.tensor([1.0, 0.0]) * scored_B,
        scored_B=scored_B,
        groups_B=torch.tensor([0, 0]),
        trajectories_T=trajectories_T,
        mask_T=torch.tensor(MASK) & scored_B[trajectories_T],
        old_logprobs_T=torch.tensor(STUDENT),
        teacher_logprobs_T=torch.tensor(TEACHER),
    )


def made(**given: object) -> OnPolicyDistillation:
    return OnPolicyDistillation(OnPolicyDistillationConfig.model_validate(given), max_response_tokens=4)


def test_each_token_answers_for_its_own_log_ratio():
    algorithm = made(distillation_coefficient=2.0)
    assert algorithm.needs == {Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS}
    result = algorithm.advantages(rollouts())
    assert result.advantages_T.tolist() == pytest.approx([1.0, -2.0, 0.0, -13.8, 4.0])
    assert result.metrics == {"teacher/kl": pytest.approx(-(0.5 - 1.0 - 6.9 + 2.0) / 4)}


def test_with_gamma_it_answers_for_what_follows_in_its_row():
    advantages = made(gamma=0.5).advantages(rollouts()).advantages_T
    assert advantages.tolist() == pytest.approx([0.5 - 0.5, -1.0, 0.0, -6.9 + 1.0, 2.0])


def test_rewards_are_added_by_their_weight():
    """The rewards 1 and 0 have the mean 0.5 and the deviation 0.7071."""
    result = made(reward_weight=2.0, group_size=2).advantages(rollouts())
    rewarded = 2.0 * 0.5 / (0.5**0.5 + 1e-6)
    expected = [0.5 + rewarded, -1.0 + rewarded, 0.0, -6.9 - rewarded, 2.0 - rewarded]
    assert result.advantages_T.tolist() == pytest.approx(expected)
    assert result.metrics["reward/group_std/zero_share"] == 0


def test_a_row_that_lost_its_reward_is_left_out():
    result = made().advantages(rollouts(scored=(False, True)))
    assert result.advantages_T.tolist() == pytest.approx([0.0, 0.0, 0.0, -6.9, 2.0])
    assert result.metrics["teacher/kl"] == pytest.approx(4.9 / 2)


def test_the_gradient_is_that_of_the_reverse_kl():
    """Every token of a vocabulary of five as a row of its own, weighted by its probability: the sum over all samples
    is the expectation, and must be the gradient of KL(student || teacher) = sum of p (log p - log q)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    log_p, log_q = logits.log_softmax(0), teacher.log_softmax(0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)

    one_each = torch.arange(5)
    algorithm = made()
    result = algorithm.advantages(
        Rollouts(
            rewards_B=torch.zeros(5),
            scored_B=torch.ones(5, dtype=torch.bool),
            groups_B=one_each,
            trajectories_T=one_each,
            mask_T=torch.ones(5, dtype=torch.bool),
            old_logprobs_T=log_p.detach(),
            teacher_logprobs_T=log_q,
        )
    )
    columns = TokenColumns(
        advantages=result.advantages_T.double(), loss_weights=log_p.detach().exp(), shares=torch.full((5,), 0.2)
    )
    loss, _ = algorithm.loss(Outputs(log_p, torch.zeros(5)), columns)
    (found,) = torch.autograd.grad(loss, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert expected.abs().max() > 0.05, "the case says something"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reward_weight": 1.0}, "give group_size 2 or more"),
        ({"group_size": 2, "resample_rounds": 1}, "resample_rounds: groups with equal rewards teach as much"),
        ({"normalize_rewards": True}, "with reward_weight: 0 learns nothing from rewards"),
        ({"reward_weight": 1.0, "group_size": 2, "kl": {"place": "reward"}}, "give kl.place: loss"),
    ],
)
def test_what_would_do_nothing_is_refused(given: dict[str, object], reason: str):
    with pytest.raises(ValidationError, match=reason):
        made(**given)
