"""What a run reads, checked before anything is allocated: tokenizer, data, reward functions, model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.config import SftConfig, TrainConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.models.loading import load_tokenizer
from tandem.reward.functions import check_functions

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class RlInputs:
    tokenizer: PreTrainedTokenizerBase
    train: RLHFDataset | None
    """None in evaluation."""
    val: RLHFDataset | None


@dataclass(slots=True)
class SftInputs:
    tokenizer: PreTrainedTokenizerBase
    train: SftDataset
    val: SftDataset | None


class Problems:
    """Collects the user's mistakes, so that all are told at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def catch(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            self.messages.append(str(error))
            return None

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.messages.append(message)

    def raise_any(self) -> None:
        if len(self.messages) == 1:
            raise UserError(self.messages[0])
        if self.messages:
            raise UserError("\n".join([f"{len(self.messages)} errors", *(f"  - {m}" for m in self.messages)]))


def read_rl_inputs(config: TrainConfig, *, training: bool) -> RlInputs:
    """Load and check everything, without `training` the validation data only. Raises UserError with every mistake."""
    problems = Problems()
    problems.require(
        bool(config.data.train_files if training else config.data.val_files),
        f"data.{'train' if training else 'val'}_files: no file given",
    )
    if training and config.trainer.eval_every:
        problems.require(bool(config.data.val_files), "trainer.eval_every: needs data.val_files")
    tokenizer = problems.catch(load_tokenizer, config.model)
    problems.catch(_check_length, config)
    train = val = None
    train_files = config.data.train_files if training else []
    if tokenizer is None:
        _check_exist([*train_files, *config.data.val_files], problems)
    else:
        train = problems.catch(RLHFDataset, train_files, tokenizer, config.data) if train_files else None
        val_files = config.data.val_files
        val = problems.catch(RLHFDataset, val_files, tokenizer, config.data) if val_files else None
    sources = {source for dataset in (train, val) if dataset for source in dataset.data_sources}
    problems.catch(check_functions, config.reward, sorted(sources))
    problems.raise_any()
    assert tokenizer is not None
    return RlInputs(tokenizer, train, val)


def read_sft_inputs(config: SftConfig) -> SftInputs:
    """Load and check everything. Raises UserError with every mistake."""
    problems = Problems()
    if config.trainer.eval_every:
        problems.require(bool(config.data.val_files), "trainer.eval_every: needs data.val_files")
    tokenizer = problems.catch(load_tokenizer, config.model)
    train = val = None
    if tokenizer is None:
        _check_exist([*config.data.train_files, *config.data.val_files], problems)
    else:
        train = problems.catch(SftDataset, config.data.train_files, tokenizer, config.data)
        val_files = config.data.val_files
        val = problems.catch(SftDataset, val_files, tokenizer, config.data) if val_files else None
    problems.raise_any()
    assert tokenizer is not None and train is not None
    return SftInputs(tokenizer, train, val)


def _check_exist(files: list[Path], problems: Problems) -> None:
    for path in files:
        problems.require(path.is_file(), f"{path}: no such data file")


def _check_length(config: TrainConfig) -> None:
    """Prompt and response must fit the positions that the model knows."""
    path = config.model.path / "config.json"
    if not path.is_file():
        return  # the tokenizer check has said so
    positions = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    wanted = config.data.max_prompt_tokens + config.generation.max_response_tokens
    if isinstance(positions, int) and wanted > positions:
        raise UserError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + generation.max_response_tokens "
            f"{config.generation.max_response_tokens} = {wanted} tokens, but {config.model.path} knows only "
            f"{positions} positions (max_position_embeddings); lower one of them"
        )
