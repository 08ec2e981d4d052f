"""GRPO and PPO from rollouts to advantages, and a user's own algorithm."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Advantages, Need, Rollouts
from tandem.algorithms.builtin.clip import ClipLossConfig
from tandem.algorithms.builtin.grpo import GRPO, GRPOConfig
from tandem.algorithms.builtin.ppo import PPOConfig
from tandem.algorithms.policy_gradient import PolicyGradient
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.algorithms import KLConfig, PolicyGradientConfig

LENGTHS = torch.tensor([2, 1, 3, 1, 2])
REWARD_KL = KLConfig(place="reward", estimator="k1", coefficient=0.1)


def rollouts(**changes) -> Rollouts:
    """Group 4: rewards 1, 0 and a lost one (row 2); groups 8 and 2: one row each. Row 4 begins with a tool's token."""
    base = Rollouts(
        rewards_B=torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0]),
        scored_B=torch.tensor([True, True, False, True, True]),
        groups_B=torch.tensor([4, 4, 4, 8, 2]),
        trajectories_T=torch.arange(5).repeat_interleave(LENGTHS),
        mask_T=torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool),
        old_logprobs_T=torch.full((9,), -1.0),
    )
    return replace(base, **changes)


def test_grpo_by_hand():
    """Group 4: mean 0.5, sample deviation sqrt(0.5); the groups of one get 0, and so does the row without a reward."""
    algorithm = make_algorithm(GRPOConfig(), 8)
    result = algorithm.advantages(rollouts())
    unit = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(result.advantages_T, torch.tensor([unit, unit, -unit, 0, 0, 0, 0, 0, 0]))
    assert algorithm.needs == frozenset() and algorithm.value_loss is None and result.returns_T is None
    assert result.metrics == {"reward/group_std/zero_share": 0.5}


def test_grpo_without_the_deviation():
    result = make_algorithm(GRPOConfig(normalize_by_std=False), 8).advantages(rollouts())
    assert result.advantages_T.tolist() == [0.5, 0.5, -0.5, 0, 0, 0, 0, 0, 0]


def test_grpo_gives_exactly_zero_where_siblings_are_equal():
    same = rollouts(rewards_B=torch.full((5,), 0.1), groups_B=torch.zeros(5, dtype=torch.int64))
    assert make_algorithm(GRPOConfig(), 8).advantages(same).advantages_T.tolist() == [0.0] * 9


def test_grpo_without_any_reward():
    lost = rollouts(scored_B=torch.zeros(5, dtype=torch.bool), mask_T=torch.zeros(9, dtype=torch.bool))
    result = make_algorithm(GRPOConfig(), 8).advantages(lost)
    assert result.advantages_T.tolist() == [0.0] * 9 and result.metrics == {}


def test_grpo_with_the_kl_in_the_reward():
    """k1 is 0.5 on each of row 0's two tokens, -1 on row 1's: rewards 1 - 0.1 and 0 + 0.1."""
    reference = torch.tensor([-1.5, -1.5, 0.0, 9.0, 9.0, 9.0, -1.0, 9.0, -1.0])
    algorithm = make_algorithm(GRPOConfig(kl=REWARD_KL, normalize_by_std=False), 8)
    result = algorithm.advantages(rollouts(ref_logprobs_T=reference))
    assert algorithm.needs == {Need.REF_LOGPROBS, Need.OLD_LOGPROBS}
    torch.testing.assert_close(result.advantages_T, torch.tensor([0.4, 0.4, -0.4, 0, 0, 0, 0, 0, 0]))
    assert result.metrics["actor/kl_coefficient"] == 0.1


def test_adaptive_kl_moves_after_the_step_and_is_kept():
    """Mean token KL (3 * 0.5 + 0 + 0) / 5 = 0.3 over a target of 0.25: error 0.2, four of eight trajectories."""
    adaptive = REWARD_KL.model_copy(update={"control": "adaptive", "target": 0.25, "horizon_trajectories": 8})
    reference = torch.tensor([-1.5, -1.5, -1.5, 9.0, 9.0, 9.0, -1.0, 9.0, -1.0])
    algorithm = make_algorithm(GRPOConfig(kl=adaptive), 8)
    metrics = algorithm.advantages(rollouts(ref_logprobs_T=reference)).metrics
    assert metrics["actor/kl_coefficient"] == 0.1
    assert algorithm.state()["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    resumed = make_algorithm(GRPOConfig(kl=adaptive), 8)
    resumed.load_state(json.loads(json.dumps(algorithm.state())))
    assert resumed.state() == algorithm.state()


def test_ppo_by_hand():
    """gamma = lambda = 1: an advantage is the reward minus the value; row 4's tool token is jumped over."""
    values = torch.tensor([0.5, 0.25, 0.5, 7, 7, 7, 2.0, 7, 1.0])
    config = PPOConfig(type="ppo", whiten_advantages=False)
    algorithm = make_algorithm(config, 8)
    result = algorithm.advantages(rollouts(values_T=values))
    assert result.advantages_T.tolist() == [0.5, 0.75, -0.5, 0, 0, 0, 3.0, 0, 2.0]
    assert result.returns_T.tolist() == [1.0, 1.0, 0.0, 0, 0, 0, 5.0, 0, 3.0]
    assert algorithm.needs == {Need.VALUES} and algorithm.value_loss is not None
    errors, returns = torch.tensor([0.5, 0.75, -0.5, 3.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 5.0, 3.0])
    explained = 1 - errors.var() / returns.var()
    assert result.metrics == pytest.approx({"critic/vf_explained_var": explained.item()})


def test_ppo_with_the_kl_in_the_reward_pays_token_by_token():
    """k1 of 0.5 a token at coefficient 0.1 takes 0.05 off each token's reward, so 0.1 off the first return."""
    config = PPOConfig(type="ppo", kl=REWARD_KL, whiten_advantages=False)
    algorithm = make_algorithm(config, 8)
    result = algorithm.advantages(rollouts(values_T=torch.zeros(9), ref_logprobs_T=torch.full((9,), -1.5)))
    assert algorithm.needs == {Need.VALUES, Need.REF_LOGPROBS, Need.OLD_LOGPROBS}
    torch.testing.assert_close(result.returns_T, torch.tensor([0.9, 0.95, -0.05, 0, 0, 0, 4.95, 0, 2.95]))


def test_ppo_whitens_over_the_tokens_of_the_step():
    advantages = make_algorithm(PPOConfig(type="ppo"), 8).advantages(rollouts(values_T=torch.zeros(9))).advantages_T
    made = advantages[rollouts().mask_T]
    assert made.mean().item() == pytest.approx(0.0, abs=1e-6) and made.std().item() == pytest.approx(1.0, abs=1e-6)
    assert not advantages[~rollouts().mask_T].any()


def test_configuration_reaches_the_loss_and_the_weights():
    kl, loss = KLConfig(place="loss", coefficient=0.2), ClipLossConfig(aggregation="fixed_length")
    config = GRPOConfig(loss=loss, entropy_coefficient=0.1, kl=kl)
    algorithm = make_algorithm(config, 100)
    assert algorithm.needs == {Need.REF_LOGPROBS}
    weights = algorithm.weights(rollouts().mask_T, rollouts().trajectories_T)
    assert weights[0].item() == pytest.approx(1 / (4 * 100)) and weights[3] == 0
    assert not algorithm.zero_without_advantage and make_algorithm(GRPOConfig(kl=REWARD_KL), 8).zero_without_advantage


class Pushes(PolicyLoss):
    """A loss of one's own that moves every token, and treats the first one apart."""

    acts_without_advantage = True

    def select(self, rollouts: Rollouts, advantages_T: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(advantages_T)) == 0

    def surrogate(self, tokens):
        return -tokens.logprobs_S, torch.zeros_like(tokens.logprobs_S)


def test_a_loss_of_ones_own_selects_tokens_and_says_which_rows_need_a_pass():
    class Own(GRPO):
        def __init__(self, config, max_response_tokens):
            super().__init__(config, max_response_tokens)
            self.loss = Pushes(config.loss, config)

    algorithm = Own(GRPOConfig(), 8)
    assert algorithm.advantages(rollouts()).selected_T.tolist() == [True] + [False] * 8
    assert not algorithm.zero_without_advantage and make_algorithm(GRPOConfig(), 8).zero_without_advantage


def test_an_algorithm_of_ones_own_is_one_method():
    class Reinforce(PolicyGradient):
        def estimate(self, rollouts: Rollouts, rewards_T: torch.Tensor) -> Advantages:
            return Advantages(rollouts.rewards_B[rollouts.trajectories_T] * rollouts.mask_T, None, {})

    result = Reinforce(PolicyGradientConfig(type="mine"), 8).advantages(rollouts())
    assert result.advantages_T.tolist() == [1, 1, 0, 0, 0, 0, 5, 0, 3]
