"""Rewards of single turns: where they lie, and what a turn then answers for."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Rollouts
from tandem.batching.packing import to_batch
from tandem.config.algorithms import AlgorithmConfig
from tandem.types import Branch, FloatArray, Group, Prompt, Score, Status, Trajectory, Turn

CONFIG = TypeAdapter[Any](AlgorithmConfig)
BY_TURN = ["dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus"]


def advantages(given: Rollouts, **options: Any) -> torch.Tensor:
    return make_algorithm(CONFIG.validate_python(options), 16).advantages(given).advantages_T


def rollouts(rewards: list[float], lengths: list[int], turns: list[float] | None, **more: Any) -> Rollouts:
    """Siblings, of which all tokens are trained."""
    rows = len(rewards)
    return Rollouts(
        rewards_B=torch.tensor(rewards),
        scored_B=torch.ones(rows, dtype=torch.bool),
        groups_B=torch.zeros(rows, dtype=torch.int64),
        trajectories_T=torch.arange(rows).repeat_interleave(torch.tensor(lengths)),
        mask_T=torch.ones(sum(lengths), dtype=torch.bool),
        values_T=torch.zeros(sum(lengths)),
        turn_rewards_T=None if turns is None else torch.tensor(turns),
        **more,
    )


def branch(mask: list[bool], *turns: Turn) -> Branch:
    length = len(mask)
    ids = np.arange(length, dtype=np.int32)
    return Branch(ids[:1], ids, np.array(mask), np.zeros(length, np.float32), np.zeros(length, np.int32), turns)


def trajectory(first: Branch, *others: Branch) -> Trajectory:
    arrays = (first.response_ids, first.loss_mask, first.rollout_logprobs, first.versions)
    prompt = Prompt(0, first.prompt_ids, "", "s", None)
    return Trajectory(prompt, 0, *arrays, "", Status.COMPLETED, first.turns, branches=others)


def column(*rows: tuple[Trajectory, float]) -> FloatArray | None:
    scores = [Score(1.0, environment_weight=weight) for _, weight in rows]
    return to_batch([Group([one for one, _ in rows], scores)]).tokens.turn_rewards


def test_a_turns_reward_lies_on_its_last_token_in_the_branch_that_trains_it() -> None:
    first = branch([True, True, False, True], Turn("policy", 2, 0.5), Turn("tool", 1), Turn("policy", 1, -1.0))
    fork = branch([False, False, False, True], Turn("policy", 2, 0.5), Turn("tool", 1), Turn("policy", 1, 4.0))
    alone = branch([True, True], Turn("policy", 2))
    found = column((trajectory(first, fork), 2.0), (trajectory(alone), 1.0))
    assert found is not None and found.tolist() == [0, 1.0, 0, -2.0, 0, 0, 0, 8.0, 0, 0]
    assert column((trajectory(alone), 1.0)) is None


@pytest.mark.parametrize("name", BY_TURN)
def test_without_rewards_of_turns_a_turn_answers_for_the_whole(name: str) -> None:
    given = {"rewards": [1.0, 0.0, 0.5], "lengths": [2, 1, 3]}
    whole = advantages(rollouts(**given, turns=[0.5] * 6), type=name, kl={"place": "none"})
    for turns in (None, [0.0] * 6):
        found = advantages(rollouts(**given, turns=turns), type=name, kl={"place": "none"}, turn_rewards="by_turn")
        torch.testing.assert_close(found, whole)


def test_a_turn_answers_for_what_came_from_it_on() -> None:
    """Row 0 has turns of two tokens and one, which earned 1 and 0.25, and got 0.5 in the end; row 1 got 0.75."""
    given = rollouts([1.75, 0.75], [3, 1], [0.0, 1.0, 0.25, 0.0])
    by_turn = {"turn_rewards": "by_turn"}
    assert advantages(given, type="dr_grpo", **by_turn).tolist() == [0.5, 0.5, -0.5, -0.5]
    assert advantages(given, type="rloo", **by_turn).tolist() == [1.0, 1.0, 0.0, -1.0]
    plain = {"kl": {"place": "none"}, "whiten_advantages": False, **by_turn}
    assert advantages(given, type="ppo", **plain).tolist() == [1.75, 1.75, 0.75, 0.75]
    assert advantages(given, type="ppo", gamma=0.5, **plain).tolist() == [0.6875, 1.375, 0.75, 0.75]


def test_what_later_branches_earn_counts_at_the_end_of_a_branch() -> None:
    branches = torch.tensor([0, 0, 1, 2])
    given = rollouts([1.75, 0.75], [3, 1], [0.0, 1.0, 0.25, 0.0], branches_T=branches)
    plain = {"kl": {"place": "none"}, "whiten_advantages": False, "turn_rewards": "by_turn"}
    assert advantages(given, type="ppo", **plain).tolist() == [1.75, 1.75, 0.75, 0.75]


def test_the_gradient_is_that_of_the_expected_reward_where_the_policy_decides_when_to_stop() -> None:
    """All pairs of siblings of a small game, each with its probability: RLOO's gradient is exactly that of the mean
    reward. A baseline by the number of the turn fails here: the game pays 1 for a first turn after which it goes on."""
    logits = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    go, win = torch.sigmoid(logits)
    games = [  # probability, log-prob of each turn, reward of each turn
        (1 - go, [(1 - go).log()], [0.2]),
        (go * win, [go.log(), win.log()], [1.0, 2.0]),
        (go * (1 - win), [go.log(), (1 - win).log()], [1.0, -0.5]),
    ]
    expected = sum(chance * sum(rewards) for chance, _, rewards in games)
    (wanted,) = torch.autograd.grad(expected, logits, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for first, second in product(games, repeat=2):
        rewards = [sum(first[2]), sum(second[2])]
        given = rollouts(rewards, [len(first[2]), len(second[2])], first[2] + second[2])
        found = advantages(given, type="rloo", turn_rewards="by_turn").double()
        logprobs = torch.stack(first[1] + second[1])
        surrogate = surrogate + (first[0] * second[0]).detach() * (found * logprobs).sum() / 2
    (gradient,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"type": "grpo"}, "give normalize_by_std: false"),
        ({"type": "gdpo", "rewards": {"a": 1.0}}, "advantages of type: gdpo are of whole trajectories"),
        ({"type": "maxrl"}, "advantages of type: maxrl are of whole trajectories"),
        ({"type": "rloo", "clip_rewards": 1.0}, "leave out normalize_rewards and clip_rewards"),
        ({"type": "dr_grpo", "loss": {"type": "gmpo"}}, "dr_grpo judges turns; use gspo"),
    ],
)
def test_what_makes_no_sense_by_turn_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CONFIG.validate_python({**options, "turn_rewards": "by_turn"})
