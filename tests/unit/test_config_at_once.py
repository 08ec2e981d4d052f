"""However many mistakes a configuration has, and wherever they are, one start tells of all of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.jobs.preflight import load_checked

SOUND = """
model: {{path: {0}/model, critic_path: null}}
data: {{train_files: [{0}/rows.jsonl], val_files: [{0}/rows.jsonl], prompts_per_step: 8, max_prompt_tokens: 16}}
algorithm: {{type: grpo, group_size: 4}}
generation: {{max_response_tokens: 8}}
reward: {{functions: ['{0}/rewards.py:score']}}
trainer: {{run_dir: {0}/run, steps: 3}}
"""


class Mistake(NamedTuple):
    changes: Mapping[str, Any]
    """Dotted keys to values; `{0}` is a directory with files."""
    said: str
    """What it gives alone, or how that begins."""
    reads: tuple[str, ...] = ()
    """Keys of the sound configuration without which there is no such mistake: what changes them changes it."""


MISTAKES = (
    # keys that are not there
    Mistake({"model.pth": "x"}, "model.pth: unknown key; did you mean model.path?"),
    Mistake({"trianer.seed": 1}, "trianer: unknown key; did you mean trainer?"),
    Mistake({"trainer.lr": 1}, "trainer.lr: unknown key; did you mean training.optimizer.lr?"),
    Mistake({"tracking.tensorbord": True}, "tracking.tensorbord: unknown key; did you mean tracking.tensorboard?"),
    Mistake({"actor_rollout_ref.rollout.n": 8}, "actor_rollout_ref.rollout.n: a key of verl; write algorithm.group"),
    Mistake({"data.train_batch_size": 8}, "data.train_batch_size: a key of verl; write data.prompts_per_step"),
    Mistake({"algorithm.gae_lambda": 0.9}, "algorithm.gae_lambda: unknown key; it is one of", ("algorithm.type",)),
    Mistake({"generation.xyzzy": 1}, "generation.xyzzy: unknown key"),
    # values that no key takes
    Mistake({"trainer.steps": "many"}, "trainer.steps: input should be a valid integer"),
    Mistake({"trainer.seed": -1}, "trainer.seed: input should be greater than or equal to 0, not -1"),
    Mistake({"trainer.save_every": "${oc.env:N}"}, "trainer.save_every: '${oc.env:N}' has a variable, which nothing"),
    Mistake({"model.dtype": "None"}, "model.dtype: 'None' is text; YAML has null for it"),
    Mistake({"training.optimizer.betas": [0.9, 1]}, "training.optimizer.betas.1: input should be less than 1, not 1"),
    Mistake({"training.activation_checkpointing": "x"}, "training.activation_checkpointing: input should be a valid"),
    Mistake({"generation.temperature": 0}, "generation.temperature: input should be greater than or equal to 0.01"),
    Mistake({"generation.eval.samples": 0}, "generation.eval.samples: input should be greater than 0, not 0"),
    Mistake({"generation.stop_strings": "end"}, "generation.stop_strings: input should be a list, as [end], not 'end'"),
    Mistake({"data.on_bad_row": "x"}, "data.on_bad_row: input should be 'error' or 'skip', not 'x'"),
    Mistake({"reward.max_error_share": 2}, "reward.max_error_share: input should be less than or equal to 1, not 2"),
    Mistake({"algorithm.group_size": 1}, "algorithm.group_size: input should be greater than or equal to 2, not 1"),
    Mistake({"cluster": 4}, "cluster: is a section of keys and values, not 4"),
    # kinds of sections that there are not
    Mistake({"generation.type": "vlm"}, "generation.type: 'vlm' is unknown"),
    Mistake({"algorithm.type": "gpro"}, "algorithm.type: 'gpro' is unknown"),
    Mistake({"data.sampler.type": "epoch"}, "data.sampler.type: 'epoch' is unknown"),
    # contradictions in a section
    Mistake({"algorithm.kl": {"control": "adaptive"}}, "algorithm.kl: control: adaptive works with place: reward"),
    Mistake({"algorithm.kl.refresh_share": 0.5}, "algorithm.kl: refresh_share: 0.5 without refresh_steps does nothing"),
    Mistake({"algorithm.rollout_correction": {"lower": 1}}, "algorithm.rollout_correction: lower: is of type: mask"),
    Mistake({"algorithm.turn_rewards": "by_turn"}, "algorithm: turn_rewards: by_turn: the deviation of whole"),
    Mistake({"algorithm.loss": {"type": "kl_cov"}}, "algorithm: loss.type: kl_cov does nothing on one optimizer step",
            ("algorithm.minibatches", "algorithm.epochs")),
    Mistake({"placement.roles": {"actor": "gpus"}}, "placement: roles.actor: pool 'gpus' is not in placement.pools",
            ("placement.pools",)),
    Mistake({"trainer.best_mode": "max"}, "trainer: best_mode: max, but there is no best_metric",
            ("trainer.best_metric",)),
    Mistake({"trainer.epochs": 2}, "trainer: give exactly one of steps and epochs", ("trainer.steps",)),
    Mistake({"training.cpu_offload": True, "training.optimizer_offload": True}, "training: cpu_offload has the"),
    Mistake({"training.optimizer.momentum": 0.5},
            "training.optimizer.momentum: unknown key; it is one of training.optimizer.type: muon"),
    Mistake({"data.images": {"min_pixels": 9, "max_pixels": 4}}, "data.images: min_pixels: 9 is more than max_pixels"),
    Mistake({"data.mixture": {"a": {"files": ["{0}/rows.jsonl"]}}}, "data.mixture: give the files as train_files or",
            ("data.train_files", "data.sampler")),
    Mistake({"generation.eval.max_response_tokens": 99}, "generation: eval.max_response_tokens: 99 is more than"),
    Mistake({"conversation": {"environment": {}}}, "conversation.environment: give tools or a user"),
    # contradictions between sections
    Mistake({"algorithm.minibatches": 9}, "algorithm: minibatches: 9 cannot share data.prompts_per_step: 8"),
    Mistake({"model.critic_path": "{0}/model"}, "algorithm: grpo has no critic"),
    Mistake({"model.critic_lora": {"rank": 4}},
            "algorithm: grpo has no critic; remove model.critic_lora or use algorithm.type: ppo"),
    Mistake({"model.teacher_path": "{0}/model"}, "algorithm: grpo has no teacher"),
    Mistake({"data.val_sets": {"a": {"files": ["{0}/rows.jsonl"], "max_response_tokens": 99}}},
            "generation: max_response_tokens: 8, for which engines have room, is less than data.val_sets.a."),
    Mistake({"reward.judge": {}}, "reward: judge: there is none; give its directory as model.judge_path"),
    Mistake({"placement.pools": {"main": [1]}, "cluster.ranks": 1}, "placement: pools: say how many processes"),
    Mistake({"trainer.max_staleness": 1, "algorithm.rollout_correction.skip_old_logprobs": False},
            "algorithm: rollout_correction.skip_old_logprobs: false leaves nothing with trainer.max_staleness: 1"),
    Mistake({"algorithm.kl": {"place": "loss", "refresh_steps": 1}, "model.lora": {}},
            "algorithm: kl.refresh_steps: with model.lora the reference is the policy without adapters"),
    # what files and the model show
    Mistake({"data.train_files": ["{0}/no.jsonl"]}, "data.train_files: {0}/no.jsonl: no such file"),
    Mistake({"data.val_files": ["{0}/rewards.py"]}, "data.val_files: {0}/rewards.py: data files end in .parquet"),
    Mistake({"data.dataset": "{0}/no.py:Rows"}, "data.dataset: "),
    Mistake({"data.max_prompt_tokens": 9999}, "data.max_prompt_tokens: 9999 + generation.max_response_tokens: 8",
            ("generation.max_response_tokens",)),
    Mistake({"reward.functions": ["{0}/no.py:f"]}, "reward.functions: "),
    Mistake({"reward.judge.template": "{0}/no.txt", "reward.judge.url": "http://x/v1", "reward.judge.model": "m"},
            "reward.judge.template: "),
    Mistake({"model.chat_template.file": "{0}/no.jinja"}, "model.chat_template.file: {0}/no.jinja is no file"),
    Mistake({"model.reward_model_path": "{0}/model"}, "model.reward_model_path: {0}/model is a language model"),
    Mistake({"model.judge_path": "{0}/no"}, "model.judge_path: {0}/no is not there", ("reward.judge",)),
    Mistake({"training.shard_size": 3}, "training.shard_size: 1 ranks cannot be cut into groups of 3",
            ("cluster", "placement")),
    Mistake({"tracking.own": ["{0}/no.py:Mine"]}, "tracking.own[0]: "),
    Mistake({"trainer.checkpoint_url": "s4://bucket"}, "trainer.checkpoint_url: s4://bucket: "),
    Mistake({"trainer.best_metric": "actor/los"}, "trainer.best_metric: 'actor/los' is no metric of this run"),
    Mistake({"trainer.branch_from": "{0}/no"}, "trainer.branch_from: {0}/no: not a checkpoint"),
    Mistake({"trainer.run_dir": "{0}/rows.jsonl"}, "trainer.run_dir: {0}/rows.jsonl: is a file",
            ("trainer.branch_from",)),
)  # fmt: skip
NUMBERS = range(len(MISTAKES))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("at_once")
    (place / "rows.jsonl").write_text('{"prompt": "1="}\n')
    (place / "rewards.py").write_text("def score(completion):\n    return 0.0\n")
    (place / "sound.yaml").write_text(SOUND.format(place))
    (place / "model").mkdir()
    described = {"model_type": "qwen2", "max_position_embeddings": 64, "num_attention_heads": 2}
    (place / "model/config.json").write_text(json.dumps(described))
    (place / "model/tokenizer.json").write_text("{}")
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2))}, place / "model/model.safetensors")
    return place


@pytest.fixture(scope="module")
def alone(place: Path) -> list[list[str]]:
    """What is said of each mistake by itself."""
    return [told(place, MISTAKES[number]) for number in NUMBERS]


def told(place: Path, *mistakes: Mistake) -> list[str]:
    changes = {key: value for mistake in mistakes for key, value in mistake.changes.items()}
    overrides = [f"{key}={json.dumps(value).replace('{0}', str(place))}" for key, value in changes.items()]
    try:
        load_checked(TrainConfig, place / "sound.yaml", overrides, claims_run_dir=True)
    except UserError as error:
        return str(error).split("\n  - ")[1:]
    return []


def meet(one: Mistake, other: Mistake) -> bool:
    """They touch the same key."""
    mine, theirs = {*one.changes, *one.reads}, {*other.changes, *other.reads}
    changed = [*itertools.product(one.changes, theirs), *itertools.product(other.changes, mine)]
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a, b in changed)


def apart(numbers: Iterator[int]) -> list[Mistake]:
    """Of the mistakes as many as touch no key of one before."""
    found: list[Mistake] = []
    for number in numbers:
        if not any(meet(MISTAKES[number], one) for one in found):
            found.append(MISTAKES[number])
    return found


def test_the_sound_configuration_has_none(place: Path) -> None:
    assert told(place) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_one_mistake_gets_one_message(alone: list[list[str]], place: Path, number: int) -> None:
    listed = [message for message in alone[number] if "not installed" not in message]
    assert len(listed) == 1 and listed[0].startswith(MISTAKES[number].said.replace("{0}", str(place))), listed


@pytest.mark.nightly
@pytest.mark.parametrize("number", NUMBERS)
def test_two_mistakes_are_told_at_once(alone: list[list[str]], place: Path, number: int) -> None:
    for other in range(number):
        if not meet(MISTAKES[number], MISTAKES[other]):
            both = told(place, MISTAKES[number], MISTAKES[other])
            missing = {*alone[number], *alone[other]} - {*both}
            assert not missing, MISTAKES[other].changes


@pytest.mark.parametrize("seed", range(12))
def test_six_mistakes_are_told_at_once(alone: list[list[str]], place: Path, seed: int) -> None:
    six = apart(iter(random.Random(seed).sample(NUMBERS, len(NUMBERS))))[:6]
    missing = {message for one in six for message in alone[MISTAKES.index(one)]} - {*told(place, *six)}
    assert len(six) == 6 and not missing


@pytest.mark.parametrize("number", range(0, len(MISTAKES), 6))
def test_each_mistake_is_told_with_as_many_others_as_there_is_room_for(
    alone: list[list[str]], place: Path, number: int
) -> None:
    """What is told beside forty others is told beside each of them: more mistakes leave less that is sound."""
    many = apart(iter([number, *random.Random(number).sample(NUMBERS, len(NUMBERS))]))
    missing = {message for one in many for message in alone[MISTAKES.index(one)]} - {*told(place, *many)}
    assert len(many) > 40 and not missing
