"""Every advantage: numbers by hand, and the papers' equations written out in plain float64 loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.builtin.grpo import GRPO, GRPOConfig
from tandem.config.algorithms import AlgorithmConfig
from tandem.errors import UserError

CONFIG = TypeAdapter(AlgorithmConfig)
LENGTHS = [2, 1, 3, 4, 1, 2, 3]
GROUPS = [4, 4, 8, 4, 2, 2, 9]
"""Group 4: rows 0, 1, 3; group 2: rows 4 and 5, of which 5 is lost; groups 8 and 9: one row each."""
REWARDS = [1.0, 0.0, 3.0, 0.5, 2.0, 0.0, 1.0]
SCORED = [True, True, True, True, True, False, True]
MASK = [1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1]
"""Row 3's second and third token are a tool's."""


def rollouts(**changes) -> Rollouts:
    lengths = torch.tensor(LENGTHS)
    base = Rollouts(
        rewards_B=torch.tensor(REWARDS),
        scored_B=torch.tensor(SCORED),
        groups_B=torch.tensor(GROUPS),
        trajectories_T=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
        mask_T=torch.tensor(MASK, dtype=torch.bool),
        old_logprobs_T=torch.linspace(-2, -0.1, sum(LENGTHS)),
    )
    return replace(base, **changes)


def advantages(name: str, given: Rollouts | None = None, max_response_tokens: int = 8, **options) -> Advantages:
    config = CONFIG.validate_python({"type": name, **options})
    return make_algorithm(config, max_response_tokens).advantages(given or rollouts())


def by_row(found: Advantages, given: Rollouts | None = None) -> list[float]:
    """The one advantage of each row's trained tokens, 0 for rows without any."""
    given = given or rollouts()
    rows = []
    for row in range(len(given.rewards_B)):
        own = found.advantages_T[(given.trajectories_T == row) & given.mask_T]
        assert len(own) == 0 or torch.equal(own, own[:1].expand(len(own)))
        rows.append(own[0].item() if len(own) else 0.0)
    assert not found.advantages_T[~given.mask_T].any()
    return rows


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0, 0, 0, 0, 0]),
        ("dr_grpo", [0.5, -0.5, 0, 0, 0, 0, 0]),
        ("rloo", [1 - 0.25, 0 - 0.75, 0, 0.5 - 0.5, 0, 0, 0]),
        ("opo", [1 - 0.6, -0.6, 0, 0.5 - 0.6, 0, 0, 0]),
        ("gpg", [0.5 * 2, -0.5 * 2, 0, 0, 0, 0, 0]),
        ("maxrl", [1.0, -1.0, 0, 0, 0, 0, 0]),
    ],
)
def test_group_baselines_by_hand(name, expected):
    """Rewards 1, 0 and 0.5 of 2, 1 and 2 trained tokens: mean 0.5, deviation 0.5, length-weighted mean 3 / 5.

    Six rows are scored, three of them in a group whose rewards differ: GPG's factor is 2. The rows alone get 0, and so
    does the row whose sibling was lost.
    """
    assert by_row(advantages(name)) == pytest.approx(expected, abs=1e-7)


NAMES = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "opo",
    "gpg",
    "maxrl",
    "otb",
    "reinforce_plus_plus_baseline",
]


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name):
    squares = torch.linspace(0.1, 0.9, sum(LENGTHS))
    same = rollouts(rewards_B=torch.full((7,), 0.1), groups_B=torch.zeros(7).long(), squared_probs_T=squares)
    options = {"kl": {"place": "none"}} if name.startswith("reinforce") else {}
    options |= {"overlong_buffer": 0.0} if name == "dapo" else {}
    assert not advantages(name, same, **options).advantages_T.any()


@pytest.mark.parametrize("name", NAMES)
def test_without_any_reward_there_is_nothing(name):
    squares = torch.zeros(sum(LENGTHS))
    none = {"scored_B": torch.zeros(7, dtype=torch.bool), "mask_T": torch.zeros(sum(LENGTHS), dtype=torch.bool)}
    options = {"kl": {"place": "none"}} if name.startswith("reinforce") else {}
    assert not advantages(name, rollouts(**none, squared_probs_T=squares), **options).advantages_T.any()


def random_rollouts() -> Rollouts:
    """40 rows in groups of 1 to 9, a fifth without a reward, a third of the tokens a tool's."""
    generator = torch.Generator().manual_seed(11)
    groups = torch.randint(9, (40,), generator=generator)
    rows = torch.arange(40).repeat_interleave(torch.randint(1, 7, (40,), generator=generator))
    scored = torch.rand(40, generator=generator) > 0.2
    mask = (torch.rand(len(rows), generator=generator) > 0.33) & scored[rows]
    logprobs = -torch.rand(len(rows), generator=generator) * 3
    rewards = torch.rand(40, generator=generator) * scored
    return Rollouts(rewards, scored, groups, rows, mask, logprobs, squared_probs_T=torch.rand(len(rows)) * 0.5)


def equation(name: str, reward: float, others: list[float], lengths: list[int], length: int) -> float:
    """The papers' advantage of one row; `others` are its siblings' rewards, `lengths` their trained tokens."""
    group = [reward, *others]
    if name == "grpo":
        return (reward - fmean(group)) / (stdev(group) + 1e-6)
    if name == "dr_grpo":
        return reward - fmean(group)
    if name == "rloo":
        return reward - fmean(others)
    if name == "maxrl":
        return (reward - fmean(group)) / fmean(group)
    tokens = [length, *lengths]
    return reward - sum(r * n for r, n in zip(group, tokens, strict=True)) / sum(tokens)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_group_baselines_against_their_equations(name):
    given = random_rollouts()
    rewards, scored, groups = given.rewards_B.tolist(), given.scored_B.tolist(), given.groups_B.tolist()
    lengths = torch.bincount(given.trajectories_T[given.mask_T], minlength=40).tolist()
    expected = []
    for row in range(40):
        siblings = [r for r in range(40) if scored[r] and groups[r] == groups[row] and r != row]
        if not scored[row] or not siblings or lengths[row] == 0:
            expected.append(0.0)
            continue
        others, their_lengths = [rewards[r] for r in siblings], [lengths[r] for r in siblings]
        expected.append(equation(name, rewards[row], others, their_lengths, lengths[row]))
    assert by_row(advantages(name, given), given) == pytest.approx(expected, abs=1e-6)
    assert max(map(abs, expected)) > 0.1


def test_reinforce_plus_plus_by_hand():
    """Two rows, k1 of 0.5 on each of row 0's tokens, coefficient 0.1: returns 0.9, 0.95 and 0; mean 0.6166…"""
    given = Rollouts(
        rewards_B=torch.tensor([1.0, 0.0]),
        scored_B=torch.ones(2, dtype=torch.bool),
        groups_B=torch.tensor([0, 1]),
        trajectories_T=torch.tensor([0, 0, 0, 1]),
        mask_T=torch.tensor([True, False, True, True]),
        old_logprobs_T=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        ref_logprobs_T=torch.tensor([-1.5, -9.0, -1.5, -1.0]),
    )
    found = advantages("reinforce_plus_plus", given, kl={"coefficient": 0.1})
    returns = [0.9, 0.95, 0.0]
    whitened = [(value - fmean(returns)) / math.sqrt(stdev(returns) ** 2 + 1e-8) for value in returns]
    expected = [whitened[0], 0.0, whitened[1], whitened[2]]
    torch.testing.assert_close(found.advantages_T, torch.tensor(expected))


def test_reinforce_plus_plus_baseline_whitens_the_centred_rewards_over_tokens():
    """Group 4's centred rewards are 0.5, -0.5 and 0, on 2, 1 and 2 tokens; the other trained tokens have 0."""
    found = advantages("reinforce_plus_plus_baseline", rollouts(scored_B=torch.tensor(SCORED)), kl={"place": "none"})
    centred = [0.5, 0.5, -0.5, *[0.0] * 9]
    assert int(rollouts().mask_T.sum()) == len(centred)
    scale = math.sqrt(stdev(centred) ** 2 + 1e-8)
    assert found.advantages_T[0].item() == pytest.approx((0.5 - fmean(centred)) / scale)
    assert found.advantages_T[2].item() == pytest.approx((-0.5 - fmean(centred)) / scale)


def test_remax_by_hand():
    greedy = torch.tensor([0.5, 0.5, 1.0, 0.5, math.nan, math.nan, 1.0])
    algorithm = make_algorithm(CONFIG.validate_python({"type": "remax"}), 8)
    assert algorithm.needs == {Need.GREEDY_REWARDS}
    given = rollouts(greedy_rewards_B=greedy)
    assert by_row(algorithm.advantages(given), given) == [0.5, -0.5, 2.0, 0.0, 0.0, 0.0, 0.0]


def test_remax_shapes_the_rewards_of_greedy_answers_as_the_others():
    """Rewards 10 and 12, greedy 11 twice: mean 11, deviation sqrt(2 / 3)."""
    given = Rollouts(
        rewards_B=torch.tensor([10.0, 12.0]),
        scored_B=torch.tensor([True, True]),
        groups_B=torch.tensor([0, 1]),
        trajectories_T=torch.tensor([0, 1]),
        mask_T=torch.tensor([True, True]),
        greedy_rewards_B=torch.tensor([11.0, 11.0]),
    )

    def shaped(**settings: Any) -> list[float]:
        algorithm = make_algorithm(CONFIG.validate_python({"type": "remax", **settings}), 8)
        return algorithm.advantages(given).advantages_T.tolist()

    assert shaped(normalize_rewards=True) == pytest.approx([-(1.5**0.5), 1.5**0.5])
    assert shaped(clip_rewards=11.0) == [-1.0, 0.0]
    with pytest.raises(ValidationError, match="overlong_buffer: remax compares with the greedy answer"):
        shaped(overlong_buffer=0.5)


def test_rows_without_a_reward_have_none_after_shaping_either():
    """What an algorithm of one's own may rely on: 0 there, whatever the length."""
    seen: list[torch.Tensor] = []

    class Watching(GRPO):
        def estimate(self, rollouts: Rollouts, rewards_T: torch.Tensor) -> Advantages:
            seen.append(rollouts.rewards_B)
            return super().estimate(rollouts, rewards_T)

    Watching(GRPOConfig(overlong_buffer=1.0), max_response_tokens=4).advantages(rollouts())
    assert (seen[0][torch.tensor(SCORED)] < torch.tensor(REWARDS)[torch.tensor(SCORED)]).any()
    assert (seen[0][~torch.tensor(SCORED)] == 0).all()


def test_gdpo_of_a_step_that_lost_every_reward_has_no_advantages():
    lost = rollouts(scored_B=torch.zeros(7, dtype=torch.bool), mask_T=torch.zeros_like(rollouts().mask_T), parts={})
    assert not advantages("gdpo", lost, rewards={"a": 1}).advantages_T.any()


def test_gdpo_by_hand():
    """Part a of the group of three: 1, 0, 0.5; part b: 0, 0, 3. Deviations 0.5 and sqrt(3); weights 1 and 2."""
    nan = math.nan
    parts = {"a": torch.tensor(REWARDS), "b": torch.tensor([0.0, 0.0, 1.0, 3.0, 1.0, nan, 1.0])}
    found = advantages("gdpo", rollouts(parts=parts), rewards={"a": 1, "b": 2})
    half, root = 0.5 / (0.5 + 1e-6), 1 / (math.sqrt(3) + 1e-6)
    total = [half - 2 * root, -half - 2 * root, 0.0, 4 * root, 0.0, 0.0]
    scale = stdev(total) + 1e-6
    expected = [total[0] / scale, total[1] / scale, 0.0, total[3] / scale, 0.0, 0.0, 0.0]
    assert by_row(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("parts", [{}, {"b": torch.tensor([0.0, math.nan, 1.0, 3.0, 1.0, math.nan, 1.0])}])
def test_gdpo_wants_every_part_of_every_scored_row(parts):
    with pytest.raises(UserError, match="'b' is not a part of every trajectory's reward"):
        advantages("gdpo", rollouts(parts=parts), rewards={"b": 1})


def test_otb_by_hand():
    """Rewards 1 and 0, of two tokens and one. Each adds 1 - 2 pi + sum(pi^2): 1 - 1 + 0.5 and 1 - 0.5 + 0.5; 1 - 1 + 1.

    W of row 0 is 0.5, then 1.5; of row 1 it is 1. The first baseline is 0.5 / 1.5; at the second token row 0 is alone.
    """
    given = Rollouts(
        rewards_B=torch.tensor([1.0, 0.0]),
        scored_B=torch.ones(2, dtype=torch.bool),
        groups_B=torch.tensor([3, 3]),
        trajectories_T=torch.tensor([0, 0, 0, 1]),
        mask_T=torch.tensor([True, False, True, True]),
        old_logprobs_T=torch.tensor([0.5, 1.0, 0.25, 0.5]).log(),
        squared_probs_T=torch.tensor([0.5, 9.0, 0.5, 1.0]),
    )
    found = advantages("otb", given)
    torch.testing.assert_close(found.advantages_T, torch.tensor([1 - 1 / 3, 0.0, 0.0, -1 / 3]))


def test_otb_against_its_equation():
    given = random_rollouts()
    expected = torch.zeros(len(given.trajectories_T))
    tokens = {row: ((given.trajectories_T == row) & given.mask_T).nonzero().flatten().tolist() for row in range(40)}
    moved = 1 - 2 * given.old_logprobs_T.double().exp() + given.squared_probs_T.double()
    for row in range(40):
        for t, place in enumerate(tokens[row]):
            alive = [r for r in range(40) if given.groups_B[r] == given.groups_B[row] and len(tokens[r]) > t]
            weights = [sum(moved[s].item() for s in tokens[r][: t + 1]) for r in alive]
            rewards = [given.rewards_B[r].item() for r in alive]
            baseline = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
            expected[place] = given.rewards_B[row].item() - baseline
    torch.testing.assert_close(advantages("otb", given).advantages_T, expected, rtol=0, atol=1e-6)


def test_overlong_punishment_by_hand():
    """At most 10 tokens, a buffer of 4: up to 6 tokens are free, 7 cost 1/4, 10 cost 1."""
    lengths = torch.tensor([6, 7, 10, 2])
    rows = torch.arange(4).repeat_interleave(lengths)
    given = Rollouts(
        torch.ones(4),
        torch.ones(4, dtype=torch.bool),
        torch.zeros(4).long(),
        rows,
        torch.ones(25).bool(),
        torch.zeros(25),
    )
    found = advantages("dapo", given, max_response_tokens=10, overlong_buffer=0.4, normalize_by_std=False)
    mean = (1 + 0.75 + 0 + 1) / 4
    assert by_row(found, given) == pytest.approx([1 - mean, 0.75 - mean, -mean, 1 - mean])


def test_overlong_punishment_is_for_the_longest_branch():
    """At most 10 tokens, a buffer of 4. The first row has branches of 6 and 7 tokens, the others one of 10 and of 2."""
    branches = torch.arange(4).repeat_interleave(torch.tensor([6, 7, 10, 2]))
    rows = torch.tensor([0, 0, 1, 2])[branches]
    mask, zeros = torch.ones(25).bool(), torch.zeros(25)
    given = Rollouts(torch.ones(3), torch.ones(3).bool(), torch.zeros(3).long(), rows, mask, zeros, branches_T=branches)
    found = advantages("dapo", given, max_response_tokens=10, overlong_buffer=0.4, normalize_by_std=False)
    mean = (0.75 + 0 + 1) / 3
    assert by_row(found, given) == pytest.approx([0.75 - mean, -mean, 1 - mean])


def test_maxrl_refuses_rewards_below_zero():
    with pytest.raises(UserError, match="a reward is -1; it needs rewards of 0 or more"):
        advantages("maxrl", rollouts(rewards_B=torch.tensor([-1.0, *REWARDS[1:]])))


def test_maxrl_where_nothing_succeeds():
    assert not advantages("maxrl", rollouts(rewards_B=torch.zeros(7))).advantages_T.any()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"type": "ppo", "loss": {"type": "gmpo"}}, "gmpo weighs whole responses, but ppo judges tokens"),
        ({"type": "dppo", "rollout_correction": {"type": "truncate"}}, "type: truncate would correct twice"),
        ({"type": "otb", "loss": {"type": "gmpo"}}, "gmpo weighs whole responses"),
        ({"type": "grpo", "loss": {"type": "kl_cov"}}, "kl_cov does nothing on one optimizer step a batch"),
        ({"type": "maxrl", "kl": {"place": "reward"}}, "maxrl divides by the mean reward"),
        ({"type": "gdpo", "rewards": {"a": 1}, "overlong_buffer": 0.1}, "gdpo reads the parts of the reward"),
        ({"type": "ppo", "resample_rounds": 2}, "rewards of one sample are always equal"),
        ({"type": "rloo", "group_size": 1}, "greater than or equal to 2"),
    ],
)
def test_senseless_pairs_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        CONFIG.validate_python(config)


def test_a_name_brings_its_papers_defaults_and_gives_way_key_by_key():
    dapo = CONFIG.validate_python({"type": "dapo", "loss": {"clip_ratio_low": 0.1}})
    assert (
        dapo.loss.clip_ratio_low == 0.1 and dapo.loss.clip_ratio_high == 0.28 and dapo.loss.aggregation == "token_mean"
    )
    assert dapo.resample_rounds == 10 and dapo.overlong_buffer == 0.2
    gspo = CONFIG.validate_python({"type": "gspo"})
    assert gspo.loss.type == "gspo" and gspo.loss.aggregation == "sequence_mean_token_mean"
    assert CONFIG.validate_python({"type": "grpo", "loss": {"type": "gspo"}}).loss == gspo.loss
    other = CONFIG.validate_python({"type": "dr_grpo", "loss": {"type": "cispo"}})
    assert other.loss.type == "cispo" and other.loss.aggregation == "token_mean" and not other.normalize_by_std
    assert CONFIG.validate_python({"type": "dr_grpo", "loss": {"dual_clip": 3}}).loss.aggregation == "fixed_length"
    plus = CONFIG.validate_python({"type": "reinforce_plus_plus", "kl": {"coefficient": 0.1}})
    assert (plus.kl.place, plus.kl.estimator, plus.kl.coefficient) == ("reward", "k1", 0.1)


def test_rewards_are_normalised_by_all_steps_so_far_and_clipped():
    """Step 1: 1 and 3, mean 2, deviation sqrt(2). Step 2: 2, 8 and a lost one: all four have mean 3.5."""
    given = rollouts(
        rewards_B=torch.tensor([1.0, 3.0]), scored_B=torch.ones(2, dtype=torch.bool), groups_B=torch.tensor([0, 0]),
        trajectories_T=torch.tensor([0, 1]), mask_T=torch.ones(2, dtype=torch.bool), old_logprobs_T=torch.zeros(2),
    )  # fmt: skip
    config = CONFIG.validate_python({"type": "dr_grpo", "normalize_rewards": True, "clip_rewards": 1.0})
    algorithm = make_algorithm(config, 8)
    first = algorithm.advantages(given).advantages_T
    torch.testing.assert_close(first, torch.tensor([-1.0, 1.0]) / math.sqrt(2))
    resumed = make_algorithm(config, 8)
    resumed.load_state(json.loads(json.dumps(algorithm.state())))
    second = resumed.advantages(
        Rollouts(
            torch.tensor([2.0, 8.0, 0.0]), torch.tensor([True, True, False]), torch.zeros(3).long(), torch.arange(3),
            torch.tensor([True, True, False]), torch.zeros(3),
        )
    )  # fmt: skip
    low = (2 - 3.5) / stdev([1, 3, 2, 8])
    mean = (low + 1) / 2
    torch.testing.assert_close(second.advantages_T, torch.tensor([low - mean, 1 - mean, 0.0]))
    assert resumed.state() == pytest.approx({"kl_coefficient": 0.001, "count": 4, "mean": 3.5, "squares": 29})
