"""One step of the framework changes the weights as examples/rl_loop.py does, on the same trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config, Qwen2ForCausalLM

from tandem.algorithms import make_algorithm
from tandem.batching.packing import split_groups, to_batch, truncated_rows
from tandem.cluster.inline import InlineCluster
from tandem.config.model import ModelConfig
from tandem.config.rules import broken_rules
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import Roles
from tandem.controller.dataflow import compute_advantages, prepare
from tandem.controller.learning import _compare_with_engine, placed_step, update
from tandem.controller.pools import ResourcePool
from tandem.controller.roles import Actor, Critic, Policy
from tandem.training.fsdp import make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, BoolArray, Group, Prompt, Score, Status, Trajectory
from tandem.workers.training import TrainSpec, TrainWorker
from tests.conftest import ROOT, load_file
from tests.unit.test_branches_change_nothing import in_branches

TEMPERATURE, MAX_RESPONSE, LR, EPS = 0.8, 12, 1e-3, 1e-4
"""A large epsilon: AdamW's first step would blow the rounding noise of a zero gradient up to the learning rate."""
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "grpo, two optimizer steps, asymmetric and dual clip": {
        "type": "grpo",
        "minibatches": 2,
        "loss": {
            "clip_ratio_low": 0.01,
            "clip_ratio_high": 0.02,
            "dual_clip": 1.01,
            "aggregation": "sequence_mean_token_mean",
        },
    },
    "grpo, kl in the loss, entropy": {
        "type": "grpo",
        "kl": {"place": "loss", "coefficient": 0.1, "estimator": "k3"},
        "entropy_coefficient": 0.05,
        "loss": {"aggregation": "sequence_mean_token_sum"},
    },
    "dr. grpo": {"type": "dr_grpo"},
    "grpo, without answers that were cut, two optimizer steps": {
        "type": "grpo",
        "minibatches": 2,
        "mask_truncated": True,
        "kl": {"place": "loss", "coefficient": 0.1},
    },
    "ppo, without answers that were cut": {"type": "ppo", "group_size": 4, "mask_truncated": True},
    "ppo": {"type": "ppo", "group_size": 4, "gae_lambda": 0.9, "gamma": 0.95},
    "ppo, two optimizer steps, kl in the reward": {
        "type": "ppo",
        "group_size": 4,
        "minibatches": 2,
        "value_clip": 0.01,
        "gae_lambda": 0.9,
        "kl": {"place": "reward", "coefficient": 0.2, "estimator": "k1"},
    },
}


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    return load_file(ROOT / "examples/rl_loop.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policy, another one as reference, and a critic whose value head is not zero."""
    shape = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(shape).save_pretrained(directory / name)
    torch.manual_seed(2)
    critic = AutoModelForTokenClassification.from_pretrained(directory / "policy", num_labels=1)
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(directory / "critic")
    return {name: directory / name for name in ("policy", "reference", "critic")}


def trajectories(seed: int = 0) -> list[Group]:
    """Three prompts, four answers each; a tool speaks in one, one has no reward, one group is all equal, two were
    cut."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(3):
        prompt = Prompt(index, rng.integers(0, 40, 3 + index).astype(np.int32), "", "test", None)
        members, scores = [], []
        for sample in range(4):
            length = int(rng.integers(2, MAX_RESPONSE + 1))
            mask = np.ones(length, dtype=np.bool_)
            if (index, sample) == (0, 1):
                mask[1 : length - 1] = False
            members.append(
                Trajectory(
                    prompt=prompt,
                    sample=sample,
                    response_ids=rng.integers(0, 40, length).astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=np.full(length, -3.5, np.float32) * mask,
                    versions=np.zeros(length, np.int32),
                    text="",
                    status=Status.TRUNCATED if (index, sample) in ((0, 2), (1, 3)) else Status.COMPLETED,
                )
            )
            value = 1.0 if index == 2 else float(rng.integers(0, 3))
            failed = (index, sample) == (1, 2)
            scores.append(Score(None, failure=Status.REWARD_ERROR) if failed else Score(value))
        groups.append(Group(members, scores))
    return groups


def configuration(models: dict[str, Path], algorithm: dict[str, Any], steps: int = 1) -> TrainConfig:
    optimizer = {"lr": LR, "eps": EPS, "max_grad_norm": 0.5}
    if algorithm["type"] == "ppo":
        algorithm = {**algorithm, "critic_optimizer": optimizer}
    return TrainConfig.model_validate(
        {
            "model": {
                "path": models["policy"],
                **({"critic_path": models["critic"]} if "ppo" in algorithm["type"] else {}),
            },
            "data": {"train_files": ["unused"]},
            "algorithm": algorithm,
            "generation": {"temperature": TEMPERATURE, "max_response_tokens": MAX_RESPONSE},
            "training": {"optimizer": optimizer, "tokens_per_micro_batch": 40},
            "trainer": {"run_dir": "unused", "steps": steps},
        }
    )


REFRESHED: dict[str, Any] = {"type": "grpo", "kl": {"place": "loss", "refresh_steps": 2}}
NO_EXPERIENCE: Any = None
"""The trajectories are given."""


def framework_step(
    config: TrainConfig, models: dict[str, Path], batch: Batch, left_out_B: BoolArray | None = None
) -> tuple[Any, Any]:
    """The trained policy and critic."""
    algorithm = make_algorithm(config.algorithm, MAX_RESPONSE)
    ranks = InlineCluster().spawn(ResourcePool("main", (1,)))
    policy = TrainSpec(config.model, config.training, config.training.optimizer, total_steps=2, temperature=TEMPERATURE)
    actor = Actor(ranks, "actor", TrainWorker, policy)
    reference = critic = None
    if config.algorithm.kl.place != "none":
        frozen = replace(policy, model=ModelConfig(path=models["reference"]), optimizer=None)
        reference = Policy(ranks, "reference", TrainWorker, frozen)
    if config.algorithm.type == "ppo":
        valued = replace(
            policy,
            model=ModelConfig(path=models["critic"]),
            optimizer=config.algorithm.critic_optimizer,
            value_head=True,
        )
        critic = Critic(ranks, "critic", TrainWorker, valued)
    with placed_step(batch, algorithm, config, 1, left_out_B) as placed:
        actor.logprobs(placed.rows(fills=("old_logprobs",))).get()
        prepare(Roles(NO_EXPERIENCE, actor, reference, critic), algorithm, placed)
        compute_advantages(algorithm, (), batch, (0, 1))
        update(actor, critic, algorithm, placed, config)
    trained = ranks.host.workers
    return trained["actor"].engine.model, trained["critic"].engine.model if critic else None


def oracle_step(
    oracle: ModuleType, config: TrainConfig, models: dict[str, Path], batch: Batch, groups: list[Group]
) -> Any:
    algorithm, kl, loss = config.algorithm, config.algorithm.kl, config.algorithm.loss
    settings = oracle.Settings(
        temperature=TEMPERATURE, clip_low=loss.clip_ratio_low, clip_high=loss.clip_ratio_high,
        dual_clip=loss.dual_clip, aggregation=loss.aggregation, max_response_tokens=MAX_RESPONSE,
        entropy_coefficient=algorithm.entropy_coefficient, kl_place=kl.place, kl_estimator=kl.estimator,
        kl_coefficient=kl.coefficient, max_grad_norm=0.5,
    )  # fmt: skip
    rollouts = [
        oracle.Rollout(
            t.prompt.token_ids.tolist(),
            t.response_ids.tolist(),
            number,
            score.value,
            [bool(made) for made in t.loss_mask],
        )
        for number, group in enumerate(groups)
        for t, score in zip(group.trajectories, group.scores, strict=True)
    ]
    learned_B = ~(truncated_rows(groups) & algorithm.mask_truncated)
    steps = split_groups(batch, algorithm.minibatches, (config.trainer.seed, 1, 0))
    parts = [rows[learned_B[rows]].tolist() for rows in steps]
    policy = AutoModelForCausalLM.from_pretrained(models["policy"]).eval()
    reference = AutoModelForCausalLM.from_pretrained(models["reference"]).eval()
    adamw = torch.optim.AdamW(policy.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    if algorithm.type != "ppo":
        settings.normalize_by_std = algorithm.normalize_by_std
        oracle.grpo_step(policy, adamw, rollouts, settings, parts, reference)
        return policy, None
    settings.gamma, settings.gae_lambda, settings.value_clip = (
        algorithm.gamma,
        algorithm.gae_lambda,
        algorithm.value_clip,
    )
    critic = AutoModelForTokenClassification.from_pretrained(models["critic"], num_labels=1).eval()
    critic_adamw = torch.optim.AdamW(critic.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    oracle.ppo_step(policy, critic, adamw, critic_adamw, rollouts, settings, parts, reference)
    return policy, critic


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_policy_rests_while_the_critic_warms_up(models: dict[str, Path], minibatches: int) -> None:
    """The critic is what it is without warm-up."""
    algorithm = {"type": "ppo", "group_size": 4, "minibatches": minibatches}
    both = framework_step(configuration(models, algorithm), models, to_batch(trajectories()))
    config = configuration(models, {**algorithm, "critic_warmup_steps": 1}, steps=2)
    batch = to_batch(trajectories())
    policy, critic = framework_step(config, models, batch)
    start = AutoModelForCausalLM.from_pretrained(models["policy"])
    assert largest_difference(policy, start) == 0 and largest_difference(critic, both[1]) == 0
    assert largest_difference(both[0], start) > 0
    assert batch.tokens.old_logprobs is not None and np.isfinite(batch.tokens.old_logprobs).all()


def test_log_probs_that_nobody_has_computed_are_compared_with_nothing(models: dict[str, Path]) -> None:
    """While the critic warms up and the engine's log-probs stand in for the old policy's."""
    algorithm = {
        "type": "ppo", "group_size": 4, "critic_warmup_steps": 1, "rollout_correction": {"skip_old_logprobs": True},
    }  # fmt: skip
    config = configuration(models, algorithm, steps=2)
    batch = to_batch(trajectories())
    framework_step(config, models, batch)
    assert batch.tokens.old_logprobs is batch.tokens.rollout_logprobs and batch.tokens.trainer_logprobs is None
    assert [_compare_with_engine(batch, staleness, 0, batch.loss_mask) for staleness in (0, 2)] == [{}, {}]


def largest_difference(ours: Any, theirs: Any) -> float:
    theirs_by_name = dict(theirs.named_parameters())
    return max(float((p - theirs_by_name[name]).detach().abs().max()) for name, p in ours.named_parameters())


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_the_oracle(oracle: ModuleType, models: dict[str, Path], case: str) -> None:
    config = configuration(models, CASES[case])
    groups = trajectories()
    batch = to_batch(groups)
    ours, our_critic = framework_step(config, models, batch, truncated_rows(groups) & config.algorithm.mask_truncated)
    theirs, their_critic = oracle_step(oracle, config, models, batch, groups)
    before = AutoModelForCausalLM.from_pretrained(models["policy"])
    assert largest_difference(ours, before) > 1e-4
    assert largest_difference(ours, theirs) < 1e-6
    if our_critic is not None:
        assert largest_difference(our_critic, their_critic) < 1e-6


@pytest.mark.parametrize(
    "algorithm", [{"type": "grpo"}, {"type": "gspo", "minibatches": 1, "epochs": 2}, {"type": "ppo"}]
)
def test_one_step_on_branches_is_that_on_whole_trajectories(models: dict[str, Path], algorithm: dict[str, Any]) -> None:
    """By real workers, in micro-batches that are smaller than a trajectory. GSPO's ratio is that of a trajectory."""
    config = configuration(models, algorithm)
    smaller = config.training.model_copy(update={"tokens_per_micro_batch": 12})
    groups = trajectories()
    cut = [
        replace(group, trajectories=[in_branches(t, [*range(2, len(t.response_ids), 3)]) for t in group.trajectories])
        for group in groups
    ]
    branches = to_batch(cut)
    assert len(branches) > 2 * len(to_batch(groups))
    whole, whole_critic = framework_step(config, models, to_batch(groups))
    found, found_critic = framework_step(config.model_copy(update={"training": smaller}), models, branches)
    assert largest_difference(whole, AutoModelForCausalLM.from_pretrained(models["policy"])) > 1e-4
    assert largest_difference(found, whole) < 1e-6
    if whole_critic is not None:
        assert largest_difference(found_critic, whole_critic) < 1e-6


def test_a_reference_approaches_the_policy_and_is_saved(models: dict[str, Path], tmp_path: Path) -> None:
    """A quarter of the way, then all of it; what was saved between comes back."""
    policy = make_engine(ModelConfig(path=models["policy"]), FsdpTrainingConfig(), AdamWConfig())
    reference = make_engine(ModelConfig(path=models["reference"]), FsdpTrainingConfig(), None)
    first = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    reference.approach(policy, 0.25)
    quarter = {name: 0.75 * first[name] + 0.25 * p.detach() for name, p in policy.model.named_parameters()}
    assert all(torch.allclose(p, quarter[name], atol=1e-6) for name, p in reference.model.named_parameters())
    assert any(not torch.equal(p, first[name]) for name, p in reference.model.named_parameters())
    saved = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    (tmp_path / "state").mkdir()
    for file in reference.save(tmp_path):
        file.write()
    reference.approach(policy, 1.0)
    assert largest_difference(reference.model, policy.model) == 0
    reference.load(tmp_path)
    assert all(torch.equal(p, saved[name]) for name, p in reference.model.named_parameters())


@pytest.mark.parametrize(
    ("algorithm", "more", "reason"),
    [
        ({"type": "ppo", "critic_warmup_steps": 1}, {}, "leaves the policy none of trainer.steps: 1"),
        ({"type": "grpo", "kl": {"refresh_steps": 2}}, {}, "place: none has no reference to refresh"),
        ({"type": "grpo", "kl": {"place": "loss", "refresh_share": 0.5}}, {}, "without refresh_steps does nothing"),
        (REFRESHED, {"training": {"type": "megatron"}}, "training.type: megatron cannot copy weights"),
        (REFRESHED, {"model": {"path": "m", "lora": {}}}, "with model.lora the reference is the policy without"),
        (
            REFRESHED,
            {"placement": {"pools": {"a": [1], "b": [1]}, "roles": {"reference": "b"}}},
            "actor and reference are in different pools",
        ),
    ],
)
def test_what_cannot_rest_or_be_refreshed_is_refused(algorithm: dict, more: dict, reason: str) -> None:
    tree = {"model": {"path": "m"}, "data": {"train_files": ["x"]}, "trainer": {"run_dir": "r", "steps": 1}}
    try:
        told = broken_rules(TrainConfig.model_validate({**tree, **more, "algorithm": algorithm}))
    except ValidationError as error:
        told = [str(error)]
    assert any(reason in mistake for mistake in told)
