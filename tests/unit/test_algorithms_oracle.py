"""The algorithms against examples/rl_loop.py: the same trajectories, the same weights afterwards."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Rollouts
from tandem.algorithms.builtin.clip import ClipLossConfig
from tandem.algorithms.builtin.grpo import GRPOConfig
from tandem.algorithms.builtin.ppo import PPOConfig
from tandem.algorithms.token_weights import token_weights
from tandem.config.algorithms import KLConfig
from tandem.types import Outputs, TokenColumns

ORACLE = Path(__file__).parents[2] / "examples/rl_loop.py"
SPEC = importlib.util.spec_from_file_location("rl_loop", ORACLE)
rl_loop = importlib.util.module_from_spec(SPEC)
sys.modules["rl_loop"] = rl_loop
SPEC.loader.exec_module(rl_loop)

GROUPS = [0, 0, 0, 1, 1, 2]
REWARDS = [1.0, 0.0, 0.5, 2.0, None, 1.5]
MINIBATCHES = [[0, 1, 2], [3, 4, 5], [5, 3, 1], [0, 2, 4]]
"""Two passes of two optimizer steps."""
SHARED = {"entropy_coefficient": 0.05, "epochs": 2, "minibatches": 2}
LR = 0.1


def tiny(model_class, seed: int, **options):
    torch.manual_seed(seed)
    size = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}
    return model_class(Qwen2Config(**size, **heads, **options)).double().eval()


def trajectories():
    """Six of 1 to 6 tokens; one was not scored, two have tokens of a tool in the middle."""
    random = torch.Generator().manual_seed(5)
    result = []
    for row, (group, reward) in enumerate(zip(GROUPS, REWARDS, strict=True)):
        prompt, response = torch.randint(23, (2, 6), generator=random).tolist()
        mask = [not (row % 2 and t in (1, 2)) for t in range(row + 1)]
        result.append(rl_loop.Rollout(prompt[: 2 + group], response[: row + 1], group, reward, mask))
    return result


def logprobs_and_entropy(policy, rows) -> Outputs:
    parts = []
    for row in rows:
        logits = policy(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits)
        parts.append((distribution.log_prob(torch.tensor(row.response_ids)), distribution.entropy()))
    return Outputs(torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts]))


def values(critic, rows) -> Outputs:
    parts = []
    for row in rows:
        every = critic(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, :, 0]
        parts.append(every[len(row.prompt_ids) - 1 : -1])
    return Outputs(values_S=torch.cat(parts))


def tandem_step(config, rows, policy, critic, reference) -> None:
    """One step by tandem.algorithms, on whole columns and plain torch engines."""
    algorithm = make_algorithm(config, 8)
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    trajectories_T = torch.arange(len(rows)).repeat_interleave(lengths)
    scored = torch.tensor([row.reward is not None for row in rows])
    mask = torch.tensor([made for row in rows for made in row.mask]) & scored.repeat_interleave(lengths)
    rewards = torch.tensor([row.reward or 0.0 for row in rows])
    with torch.no_grad():
        old = logprobs_and_entropy(policy, rows).logprobs_S
        ref = logprobs_and_entropy(reference, rows).logprobs_S if algorithm.needs else None
        old_values = values(critic, rows).values_S
    rollouts = Rollouts(rewards, scored, torch.tensor(GROUPS), trajectories_T, mask, old, ref, values_T=old_values)
    found = algorithm.advantages(rollouts)
    policy_optimizer = torch.optim.SGD(policy.parameters(), lr=LR)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=LR)
    whole = TokenColumns(
        old_logprobs=old, ref_logprobs=ref, values=old_values, advantages=found.advantages_T, returns=found.returns_T
    )
    for minibatch in MINIBATCHES:
        take = torch.cat([torch.arange(int(offsets[row]), int(offsets[row + 1])) for row in minibatch])
        columns = whole.map(lambda column, take=take: column[take])
        columns.loss_weights = algorithm.weights(mask[take], trajectories_T[take])
        columns.shares = token_weights("token_mean", mask[take], trajectories_T[take], 8)
        chosen = [rows[row] for row in minibatch]
        update(policy, policy_optimizer, algorithm.loss, logprobs_and_entropy(policy, chosen), columns)
        if algorithm.value_loss is not None:
            update(critic, critic_optimizer, algorithm.value_loss, values(critic, chosen), columns)


def update(model, optimizer, loss, outputs, columns) -> None:
    optimizer.zero_grad()
    loss(outputs, columns)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def assert_same_weights(found, expected, before) -> None:
    moved = max((a - b).abs().max().item() for a, b in zip(expected.parameters(), before.parameters(), strict=True))
    assert moved > 1e-3
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def clip(**more):
    return {"loss": ClipLossConfig(clip_ratio_low=0.02, clip_ratio_high=0.03, **more)}


CASES = [
    clip(),
    clip(aggregation="sequence_mean_token_sum", dual_clip=1.01),
    {**clip(aggregation="sequence_mean_token_mean"), "kl": KLConfig(place="loss", estimator="k2", coefficient=0.3)},
    {**clip(aggregation="fixed_length"), "kl": KLConfig(place="reward", estimator="k1", coefficient=0.3)},
    {**clip(), "kl": KLConfig(place="loss", estimator="k3", coefficient=0.3)},
    {**clip(), "kl": KLConfig(place="reward", estimator="k3", coefficient=0.3)},
]


def oracle_settings(config, **more):
    return rl_loop.Settings(
        clip_low=config.loss.clip_ratio_low,
        clip_high=config.loss.clip_ratio_high,
        dual_clip=config.loss.dual_clip,
        aggregation=config.loss.aggregation,
        entropy_coefficient=config.entropy_coefficient,
        kl_place=config.kl.place,
        kl_estimator=config.kl.estimator,
        kl_coefficient=config.kl.coefficient,
        **more,
    )


@pytest.mark.parametrize("case", [*CASES, {**clip(), "normalize_by_std": False}])
def test_grpo_step(case):
    config = GRPOConfig(**SHARED, **case)
    policy, reference = tiny(Qwen2ForCausalLM, 0), tiny(Qwen2ForCausalLM, 1)
    expected, found = copy.deepcopy(policy), copy.deepcopy(policy)
    optimizer = torch.optim.SGD(expected.parameters(), lr=LR)
    settings = oracle_settings(config, normalize_by_std=config.normalize_by_std)
    rl_loop.grpo_step(expected, optimizer, trajectories(), settings, MINIBATCHES, reference)
    critic = tiny(Qwen2ForTokenClassification, 2, num_labels=1)
    tandem_step(config, trajectories(), found, critic, reference)
    assert_same_weights(found, expected, policy)


@pytest.mark.parametrize(
    "case",
    [*CASES, {**clip(), "gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": False}, {**clip(), "value_clip": None}],
)
def test_ppo_step(case):
    config = PPOConfig(type="ppo", **{"value_clip": 0.05, **SHARED, **case})
    policy, reference = tiny(Qwen2ForCausalLM, 0), tiny(Qwen2ForCausalLM, 1)
    critic = tiny(Qwen2ForTokenClassification, 2, num_labels=1)
    models = [copy.deepcopy(model) for model in (policy, critic)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    settings = oracle_settings(
        config,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        whiten=config.whiten_advantages,
        value_clip=config.value_clip,
    )
    rl_loop.ppo_step(*models, *optimizers, trajectories(), settings, MINIBATCHES, reference)
    found = [copy.deepcopy(model) for model in (policy, critic)]
    tandem_step(config, trajectories(), *found, reference)
    for ours, theirs, before in zip(found, models, (policy, critic), strict=True):
        assert_same_weights(ours, theirs, before)


def test_the_oracle_is_one_short_file_of_its_own():
    source = ORACLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    assert "tandem" not in source
