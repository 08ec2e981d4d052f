"""Notes that are printed before a run starts: on what is allowed, but seldom meant."""

import os
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import SftConfig, TrainConfig
from tandem.controller.placement import pools_of
from tandem.errors import UserError
from tandem.jobs.preflight.models import adapter_keys
from tandem.models.end_of_sequence import end_mismatch
from tandem.models.families import sees_pictures
from tandem.planning.command import verdict
from tandem.planning.roles import moments


def tokenizer_notes(config: TrainConfig | SftConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Of the tokenizer, beside the model's own files."""
    if (mismatch := end_mismatch(config.model.path, tokenizer)) is not None:
        yield f"model.path: {mismatch}"


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


def memory_notes(config: TrainConfig | SftConfig, card_bytes: int, card: str) -> Iterator[str]:
    """What `tandem plan` says of this machine's cards, or why it cannot: it is an estimate, which stops no run."""
    try:
        yield from (f"memory of {line}" for line in verdict(moments(config, card_bytes), card_bytes, card))
    except UserError as error:
        yield f"memory: {error}"
