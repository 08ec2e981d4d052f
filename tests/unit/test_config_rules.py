"""What sections must keep together: each rule with what breaks it, and of several that are broken all are told."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.config.load import ParsedConfig, read_config
from tandem.config.rules import RULES, algorithm, engines, mixers, models, pictures, placement, ranks, validation
from tandem.config.tree import DpoConfig, EvalConfig, RewardModelConfig, SftConfig, TrainConfig

SOUND = {
    TrainConfig: """
model: {{path: {0}/model}}
data: {{train_files: [a.jsonl], prompts_per_step: 8, max_prompt_tokens: 16}}
algorithm: {{type: grpo}}
generation: {{max_response_tokens: 8}}
trainer: {{run_dir: {0}/run, steps: 3}}
""",
    EvalConfig: """
model: {{path: {0}/model}}
data: {{val_files: [a.jsonl], max_prompt_tokens: 16}}
generation: {{max_response_tokens: 8}}
""",
    SftConfig: """
model: {{path: {0}/model}}
data: {{train_files: [a.jsonl]}}
trainer: {{run_dir: {0}/run, steps: 3}}
""",
}
SOUND |= dict.fromkeys((DpoConfig, RewardModelConfig), SOUND[SftConfig])
MODELS: Mapping[str, Mapping[str, Any]] = {
    "model": {
        "model_type": "qwen2",
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    },
    "sees": {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}},
    "sees_alone": {"model_type": "mistral3"},
    "hybrid": {"model_type": "nemotron_h", "num_attention_heads": 2},
    "attends": {"model_type": "granitemoehybrid", "layer_types": ["attention"], "num_attention_heads": 2},
    "gelu": {"model_type": "llama", "hidden_act": "gelu"},
    "gpt2": {"model_type": "gpt2"},
    "incomplete": {"model_type": "llama"},
}
VLLM = {"type": "vllm", "max_response_tokens": 8}
DISTILS = {"type": "on_policy_distillation"}
SERVED = {**DISTILS, "teacher": {"url": "u", "model": "m"}}
REFRESHES = {"place": "loss", "refresh_steps": 1}
APART = {"pools": {"a": [1], "b": [1]}, "roles": {"reference": "b"}}


class Row(NamedTuple):
    rule: Callable[..., Iterator[str]]
    changes: Mapping[str, Any]
    """Dotted keys to values by which a sound configuration breaks the rule, and no other; `{0}`: where models are."""
    told: str
    """How the message begins."""
    kind: Any = TrainConfig
    reads: tuple[str, ...] = ()
    """Further keys by which another change would mend it, or change what is told."""


ROWS = (
    Row(models.rows_train_one_model, {"model.critic_lora": {}},
        "model: critic_lora: this command trains no critic; leave it out", SftConfig),
    Row(models.rows_train_one_model, {"model.critic_path": "x"}, "model: critic_path: this command trains no critic",
        SftConfig),
    Row(models.rows_train_one_model, {"model.teacher_path": "x"}, "model: teacher_path: this command learns from no",
        DpoConfig),
    Row(models.rows_train_one_model, {"model.judge_path": "x"}, "model: judge_path: this command asks no judge",
        RewardModelConfig),
    Row(algorithm.rows_are_never_stale, {"trainer.max_staleness": 1},
        "trainer: max_staleness: 1, but this command generates no answers that could be stale", SftConfig),
    Row(algorithm.rows_have_others_to_mismatch, {"preference.loss": "kto", "data.rows_per_step": 1},
        "preference: loss: kto estimates the KL from prompts with other rows' answers", DpoConfig),
    Row(models.critic_is_trained, {"model.critic_path": "{0}/model"},
        "algorithm: grpo has no critic; remove model.critic_path or use algorithm.type: ppo",
        reads=("algorithm.type",)),
    Row(models.critic_is_trained, {"model.critic_lora": {}},
        "algorithm: grpo has no critic; remove model.critic_lora or use algorithm.type: ppo",
        reads=("algorithm.type",)),
    Row(models.teacher_is_one, {"model.teacher_path": "{0}/model"},
        "algorithm: grpo has no teacher; remove model.teacher_path or use", reads=("algorithm.type",)),
    Row(models.teacher_is_one, {"algorithm": DISTILS},
        "algorithm: on_policy_distillation learns from a teacher; give its directory as model.teacher_path",
        reads=("model.teacher_path",)),
    Row(models.teacher_is_one, {"algorithm": SERVED, "model.teacher_path": "{0}/model"},
        "algorithm: teacher: model.teacher_path is another one; give one of them"),
    Row(models.served_teacher_answers_at_1, {"algorithm": SERVED, "generation.temperature": 0.7},
        "algorithm: teacher: servers tell log-probs at temperature 1, and the student's would be at generation.temper"),
    Row(algorithm.minibatches_share_prompts, {"algorithm.minibatches": 9},
        "algorithm: minibatches: 9 cannot share data.prompts_per_step: 8; lower it"),
    Row(algorithm.warmup_leaves_the_policy_steps, {"algorithm": {"type": "ppo", "critic_warmup_steps": 3}},
        "algorithm: critic_warmup_steps: 3 leaves the policy none of trainer.steps: 3"),
    Row(algorithm.refreshed_reference_has_weights, {"algorithm.kl": REFRESHES, "model.lora": {}},
        "algorithm: kl.refresh_steps: with model.lora the reference is the policy without adapters"),
    Row(algorithm.refresh_copies_weights, {"algorithm.kl": REFRESHES, "training": {"type": "megatron"}},
        "algorithm: kl.refresh_steps: training.type: megatron cannot copy weights from the policy; use fsdp"),
    Row(algorithm.refreshed_reference_is_near, {"algorithm.kl": REFRESHES, "placement": APART},
        "algorithm: kl.refresh_steps: actor and reference are in different pools; place them in one"),
    Row(algorithm.distributions_are_told,
        {"algorithm": {**DISTILS, "top_k": 8}, "model.teacher_path": "{0}/model", "training": {"type": "megatron"}},
        "algorithm: top_k: training.type: megatron tells no distributions yet; use fsdp, or top_k: 0"),
    Row(algorithm.staleness_is_corrected,
        {"trainer.max_staleness": 1, "algorithm.rollout_correction.skip_old_logprobs": False},
        "algorithm: rollout_correction.skip_old_logprobs: false leaves nothing with trainer.max_staleness: 1 that"),
    Row(algorithm.staleness_is_corrected, {"trainer.max_staleness": 2, "algorithm.loss": {"type": "reinforce"}},
        "algorithm: loss.type: reinforce has no ratio to the policy that sampled, so with trainer.max_staleness: 2"),
    Row(models.judge_is_one, {"reward.judge": {}},
        "reward: judge: there is none; give its directory as model.judge_path, or a url", reads=("model.judge_path",)),
    Row(models.judge_is_one, {"reward.judge": {"url": "u", "model": "m"}, "model.judge_path": "{0}/model"},
        "reward: judge.url: u, but model.judge_path is a judge, too; give one of them"),
    Row(models.answers_fit_positions, {"data.max_prompt_tokens": 60},
        "data.max_prompt_tokens: 60 + generation.max_response_tokens: 8 = 68 tokens, but {0}/model knows only 64 pos",
        reads=("model.path",)),
    Row(models.answers_fit_positions, {"data.max_prompt_tokens": 60},
        "data.max_prompt_tokens: 60 + generation.max_response_tokens: 8 = 68 tokens, but {0}/model knows", EvalConfig,
        reads=("model.path",)),
    Row(validation.validation_has_room, {"data.val_sets": {"a": {"files": ["a.jsonl"], "max_response_tokens": 99}}},
        "generation: max_response_tokens: 8, for which engines have room, is less than data.val_sets.a.max_response"),
    Row(placement.pools_count_processes, {"placement.pools": {"main": [1]}, "cluster.ranks": 1},
        "placement: pools: say how many processes there are, so leave out cluster.ranks: 1"),
    Row(placement.pools_have_their_nodes, {"placement.pools": {"main": [2, 2]}},
        "placement: pools: cluster.type: local is one node; give each pool one number, or use ray", reads=("cluster",)),
    Row(engines.judge_has_devices, {"model.judge_path": "{0}/model", "reward.judge": {"generation": VLLM}},
        "placement: roles: reward.judge.generation.type: vllm takes devices of its own; give judge a pool in",
        reads=("placement",)),
    Row(engines.reward_model_leaves_weights,
        {"model.reward_model_path": "{0}/model", "generation": {**VLLM, "sleep": "weights"}},
        "placement: roles: model.reward_model_path scores on the engine's devices, which must keep its weights",
        reads=("placement",)),
    Row(engines.engines_share_ranks, {"cluster.ranks": 2, "generation": {**VLLM, "tensor_parallel": 4}},
        "generation.tensor_parallel: 4 does not divide the 2 ranks of the rollout's pool", reads=("placement",)),
    Row(engines.weights_come_back, {"model.lora": {}, "generation": {**VLLM, "sleep": "weights"}},
        "generation.sleep: weights, but with model.lora no publish fills them again; use cache"),
    Row(engines.weights_come_back, {"model.path": "{0}/sees", "model.vision_tower": "frozen",
        "generation": {**VLLM, "sleep": "weights"}},
        "generation.sleep: weights, but with model.vision_tower: frozen no publish fills them again; use cache",
        reads=("model.lora",)),
    Row(engines.quantization_is_said_once,
        {"generation": {**VLLM, "quantization": "mxfp8", "engine_args": {"dtype": "float16"}}},
        "generation.engine_args.dtype: generation.quantization: mxfp8 says it, too; leave one of them out"),
    Row(validation.validation_has_rows, {"trainer.eval_every": 1},
        "trainer.eval_every: 1 needs data.val_files, and none is given", reads=("data.val_sets",)),
    Row(validation.validation_has_rows, {"trainer.eval_every": 1},
        "trainer.eval_every: 1 needs data.val_files, and none is given", SftConfig),
    Row(pictures.pictures_run_so, {"model.path": "{0}/sees", "training.compile": True},
        "training.compile: a model that sees pictures (qwen2_5_vl) does not run so yet; leave it out"),
    Row(pictures.pictures_run_so, {"model.path": "{0}/sees", "training.context_parallel": 2, "cluster.ranks": 2},
        "training.context_parallel: a model that sees pictures (qwen2_5_vl) does not run so yet", SftConfig),
    Row(pictures.pictures_run_so, {"model.path": "{0}/sees", "training": {"type": "megatron"}},
        "training.type: megatron: a model that sees pictures (qwen2_5_vl) does not run so yet; use fsdp"),
    Row(pictures.pictures_run_so, {"model.path": "{0}/sees", "generation": {**VLLM, "type": "sglang"}},
        "generation.type: sglang: a model that sees pictures (qwen2_5_vl) does not run so yet; use native or vllm",
        EvalConfig),
    Row(pictures.pictures_run_so, {"model.path": "{0}/sees_alone", "cluster.ranks": 2},
        "model.vision_tower: train on 2 ranks (actor): a model that sees pictures (mistral3) does not run so yet",
        reads=("model.lora", "placement", "training")),
    Row(pictures.readers_see_pictures,
        {"model.path": "{0}/sees", "model.critic_path": "{0}/model", "algorithm": {"type": "ppo"}},
        "model.critic_path: {0}/model sees no pictures, whose rows may have some; give a model of the policy's family"),
    Row(pictures.readers_see_pictures, {"model.path": "{0}/sees", "algorithm": SERVED},
        "algorithm.teacher: {0}/sees sees pictures, and a served teacher is shown none; give a model.teacher_path"),
    Row(mixers.mixers_run_so, {"model.path": "{0}/hybrid", "generation": {"type": "vllm"}},
        "generation.type: layers of {0}/hybrid carry a state from token to token, and no weights have been published"),
    Row(mixers.mixers_run_so, {"model.path": "{0}/hybrid", "training.compile": True},
        "training.compile: layers of {0}/hybrid (nemotron_h) carry a state from token to token, and are not compiled"),
    Row(mixers.mixers_run_so, {"model.path": "{0}/hybrid", "training.context_parallel": 2, "cluster.ranks": 2},
        "training.context_parallel: layers of {0}/hybrid (nemotron_h) carry a state from token to token, which ranks",
        SftConfig),
    Row(ranks.models_lie_on_ranks, {"model.path": "{0}/hybrid", "training": {"type": "megatron"}},
        "training.type: megatron has no bridge for model type nemotron_h of {0}/hybrid, only for llama, qwen2,",
        DpoConfig),
    Row(ranks.models_lie_on_ranks, {"cluster.ranks": 4, "training.shard_size": 3},
        "training.shard_size: 4 ranks cannot be cut into groups of 3; use a divisor", reads=("placement",)),
    Row(ranks.models_lie_on_ranks, {"cluster.ranks": 3, "training.context_parallel": 3},
        "training.context_parallel: 3 ranks cannot share 2 attention heads evenly", reads=("model.path", "placement")),
    Row(ranks.models_lie_on_ranks, {"cluster.ranks": 3, "training.context_parallel": 2},
        "training.context_parallel: 3 ranks cannot be cut into groups of 2; use a divisor", DpoConfig),
    Row(ranks.models_lie_on_ranks, {"cluster.ranks": 3, "training": {"type": "megatron", "tensor_parallel": 2}},
        "training: {0}/model cannot lie on 3 ranks so: tensor_parallel * context_parallel * pipeline_parallel = 2 does",
        reads=("model.path", "placement")),
    Row(ranks.models_lie_on_ranks, {"model.path": "{0}/gelu", "training": {"type": "megatron"}},
        "model.path: Megatron's bridge leaves out what config.json of {0}/gelu says: hidden_act: gelu", SftConfig),
    Row(ranks.models_lie_on_ranks, {"model.path": "{0}/gpt2", "training": {"type": "megatron"}},
        "training.type: megatron has no bridge for model type gpt2 of {0}/gpt2, only for llama, qwen2,", SftConfig),
    Row(ranks.models_lie_on_ranks, {"model.path": "{0}/incomplete", "training": {"type": "megatron"}},
        "{0}/incomplete/config.json: is not complete (KeyError('num_attention_heads'))", SftConfig),
    Row(ranks.models_lie_on_ranks,
        {"model.reward_model_path": "{0}/model", "cluster.ranks": 3, "training.context_parallel": 2},
        "training.context_parallel: 3 ranks cannot be cut into groups of 2; use a divisor", EvalConfig),
    Row(ranks.megatron_has_it, {"training": {"type": "megatron", "router_replay": True}},
        "training.router_replay: no generation.type returns which experts it chose for a token"),
    Row(ranks.megatron_has_it, {"training": {"type": "megatron"}, "model.lora": {}},
        "model.lora: adapters are of training.type: fsdp; take that, or train the whole model"),
    Row(ranks.megatron_has_it,
        {"training": {"type": "megatron"}, "model.critic_lora": {}, "algorithm": {"type": "ppo"}},
        "model.critic_lora: adapters are of training.type: fsdp; take that, or train the whole model"),
    Row(ranks.megatron_has_it, {"training": {"type": "megatron", "optimizer": {"type": "muon"}}},
        "training.optimizer.type: muon is of training.type: fsdp; Megatron-Core's optimizer is adamw"),
    Row(ranks.megatron_has_it,
        {"training": {"type": "megatron"}, "algorithm": {"type": "ppo", "critic_optimizer": {"type": "adamw_8bit"}}},
        "algorithm.critic_optimizer.type: adamw_8bit is of training.type: fsdp; Megatron-Core's optimizer is adamw"),
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rules")
    for name, described in MODELS.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(described))
    for kind, text in SOUND.items():
        (place / f"{kind.__name__}.yaml").write_text(text.format(place))
    return place


def read(place: Path, kind: Any, *some: Mapping[str, Any]) -> ParsedConfig[Any]:
    changes = {key: value for one in some for key, value in one.items()}
    overrides = [f"{key}={json.dumps(value).replace('{0}', str(place))}" for key, value in changes.items()]
    return read_config(kind, place / f"{kind.__name__}.yaml", overrides)


def meet(one: Row, other: Row) -> bool:
    """They touch the same key."""
    changed = [
        *itertools.product(one.changes, (*other.changes, *other.reads)),
        *itertools.product(other.changes, (*one.changes, *one.reads)),
    ]
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a, b in changed)


PAIRS = [
    (one, other)
    for one, other in itertools.combinations(ROWS, 2)
    if one.rule is not other.rule and one.kind is other.kind and not meet(one, other)
]


def test_every_rule_has_a_row() -> None:
    listed = [rule for some in RULES.values() for rule in some]
    assert len({*listed}) == len(listed)
    assert {row.rule for row in ROWS} == {*listed}


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_configuration_breaks_none(place: Path, kind: Any) -> None:
    assert read(place, kind).problems == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.rule.__name__} {row.kind.__name__}")
def test_a_broken_rule_is_told_by_itself(place: Path, row: Row) -> None:
    found = read(place, row.kind, row.changes)
    (told,) = found.problems
    assert told.startswith(row.told.format(place))
    assert {*row.rule(found.config)} == {told}


def test_a_hybrid_family_without_states_runs_as_others_do(place: Path) -> None:
    """As its layers say: Granite 4's dense models are of the same type."""
    changes = {"model.path": "{0}/attends", "training.context_parallel": 2, "cluster.ranks": 2}
    assert read(place, SftConfig, changes).problems == []


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_of_two_broken_rules_both_are_told(place: Path, seed: int, sound: bool) -> None:
    """Also of a configuration that has a mistake of another kind."""
    one, other = random.Random(seed).choice(PAIRS)
    unknown = {} if sound else {"model.dtype": "None"}
    told = read(place, one.kind, one.changes, other.changes, unknown).problems
    for row in (one, other):
        assert any(message.startswith(row.told.format(place)) for message in told), (row.changes, told)
    assert len(told) >= (2 if sound else 3)
