"""Notes that are printed before a run starts: on what is allowed, but seldom meant."""

import os
from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import RewardModelConfig, SftConfig, TrainConfig
from tandem.controller.placement import pools_of
from tandem.errors import UserError
from tandem.jobs.inputs import Inputs
from tandem.jobs.preflight.models import adapter_keys
from tandem.models.end_of_sequence import end_mismatch, ends_of_answers
from tandem.pictures.vlm_config import sees_pictures
from tandem.planning.command import verdict
from tandem.planning.phases import phase_peaks
from tandem.tracking.trajectories import largest_file_bytes
from tandem.types import Demonstration, Preference, RatedAnswer

_LOOKED_AT = 100
"""Rows that stand for all."""


def tokenizer_notes(config: TrainConfig | SftConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Of the tokenizer, beside the model's own files."""
    if (mismatch := end_mismatch(config.model.path, tokenizer)) is not None:
        yield f"model.path: {mismatch}"


def endless_note(config: TrainConfig | SftConfig, inputs: Inputs[Any]) -> Iterator[str]:
    """Of demonstrations, or answers of pairs, that teach no token which ends answers: a policy goes on after them."""
    if not isinstance(config, SftConfig) or isinstance(config, RewardModelConfig) or inputs.train is None:
        return
    ends = ends_of_answers(inputs.tokenizer)
    looked_at = [_demonstration_of(inputs.train[row]) for row in range(min(_LOOKED_AT, len(inputs.train)))]
    if ends and not any(ends & set(one.response_ids[one.loss_mask].tolist()) for one in looked_at):
        named: Any = inputs.tokenizer.convert_ids_to_tokens(sorted(ends))
        yield (
            f"{config.data.train_key}: of the first {len(looked_at)} rows none teaches a token that ends answers "
            f"({', '.join(map(repr, named))}), so the model learns to go on after an answer, up to the longest; name "
            "what the chat template ends a turn with as eos_token in tokenizer_config.json, and its id as eos_token_id "
            "in generation_config.json, or give another template as model.chat_template.file"
        )


def _demonstration_of(item: Demonstration | Preference | RatedAnswer) -> Demonstration:
    """What the policy is to say."""
    match item:
        case Preference():
            return item.chosen
        case RatedAnswer():
            return item.answer
        case _:
            return item


def notes(config: TrainConfig | SftConfig, rows: int) -> Iterator[str]:
    """`rows`: the usable ones to train on."""
    if isinstance(config, SftConfig):
        key, step = "data.rows_per_step", config.data.rows_per_step
    else:
        key, step = "data.prompts_per_step", config.data.prompts_per_step
    if rows < step:
        holds = f"{config.data.train_key} holds {rows:,} rows"
        yield f"{key}: {step:,}, but {holds}: every step takes some of them repeatedly"
    if config.data.val_paths and not config.trainer.eval_every:
        yield "trainer.eval_every is 0: the rows to validate on are read, and never asked"
    if isinstance(config, TrainConfig) and config.trainer.max_staleness > 1 and not config.algorithm.loss.bounds_ratio:
        loss = config.algorithm.loss.type
        yield (
            f"algorithm.loss.type: {loss} does not bound its ratio, and with trainer.max_staleness above 1 it learned "
            f"far worse (docs/algorithms/{loss}.md)"
        )
    model = config.model
    asked_for = model.vision_tower == "train" and "vision_tower" in model.model_fields_set
    if asked_for and sees_pictures(model.path):
        for key, whose in adapter_keys(config).items():
            yield f"model.vision_tower: train, but with {key} adapters alone learn: the tower of {whose} stays as it is"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        yield from memory_notes(config, device.total_memory, device.name)
    processes, cores = sum(pool.size for pool in pools_of(config).pools.values()), len(os.sched_getaffinity(0))
    if config.cluster.type == "local" and processes > cores and not torch.cuda.is_available():
        key = "placement.pools" if isinstance(config, TrainConfig) and config.placement.pools else "cluster.ranks"
        yield f"{key}: {processes} processes compute on {cores} cores, and wait for one another; fewer are faster"


def disk_line(config: TrainConfig | SftConfig) -> Iterator[str]:
    """About how much of the disk the trajectories of a run take where all answers are of the greatest length."""
    if not isinstance(config, TrainConfig) or not config.trainer.trajectories_every:
        return
    trainer, tokens = config.trainer, config.generation.max_response_tokens
    answers = config.data.prompts_per_step * config.algorithm.group_size
    file = largest_file_bytes(answers, config.data.max_prompt_tokens, tokens) / 2**30
    written = trainer.steps // trainer.trajectories_every if trainer.steps else inf
    held = file * min(trainer.keep_trajectories or inf, written)
    if trainer.keep_trajectories_gib:
        held = min(held, max(trainer.keep_trajectories_gib, file))
    most = f"about {in_gib(held)} stay" if held < inf else "all of them stay"
    yield (
        f"trajectories: a step of {answers:,} answers of at most {tokens:,} tokens writes about {in_gib(file)}; {most} "
        "(trainer.keep_trajectories, trainer.keep_trajectories_gib), and of validation answers by the same rules"
    )


def in_gib(gib: float) -> str:
    """In the unit in which it is 1 or more, but for what is less than a KiB."""
    for unit in ("GiB", "MiB"):
        if gib >= 1:
            return f"{gib:.1f} {unit}"
        gib *= 1024
    return f"{gib:.1f} KiB"


def memory_notes(config: TrainConfig | SftConfig, card_bytes: int, card: str) -> Iterator[str]:
    """What `tandem plan` says of this machine's cards, or why it cannot: it is an estimate, which stops no run."""
    try:
        yield from (f"memory of {line}" for line in verdict(phase_peaks(config, card_bytes), card_bytes, card))
    except UserError as error:
        yield f"memory: {error}"
