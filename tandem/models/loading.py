"""Model directories -> tokenizers, policies, critics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.config import ModelConfig
from tandem.errors import UserError
from tandem.models.attention import ATTENTION

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; UserError when there is none."""
    _check_directory(config.path)
    if not any((config.path / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make an empty one
        raise _no_tokenizer(config.path, f"none of {', '.join(_TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(
            config.path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _no_tokenizer(config.path, _first_line(error)) from None


def _no_tokenizer(path: Path, reason: str) -> UserError:
    return UserError(
        f"model.path: {path} has no usable tokenizer ({reason}); "
        "copy tokenizer.json and tokenizer_config.json of the base model into it"
    )


def load_policy(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A causal language model with every dropout at 0, in `model.dtype`."""
    return _load(AutoModelForCausalLM, config.path, config, device)


def load_critic(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The same body with a value head of one number a token; a directory without such a head gets a zero one."""
    path = config.critic_path or config.path
    had_head = any(name.startswith(("score.", "classifier.")) for name in _weight_names(path))
    model = _load(AutoModelForTokenClassification, path, config, device, num_labels=1)
    if not had_head:
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.")):
                torch.nn.init.zeros_(parameter)
    return model


def _load(auto_class: Any, path: Path, config: ModelConfig, device: Any, **options: Any) -> PreTrainedModel:
    _check_directory(path)
    common = {"local_files_only": True, "trust_remote_code": config.trust_remote_code}
    try:
        model_config = AutoConfig.from_pretrained(path, **common, **options)
        for name, value in vars(model_config).items():
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(model_config, name, 0.0)
        model_config.classifier_dropout = 0.0
        model = auto_class.from_pretrained(
            path, config=model_config, dtype=getattr(torch, config.dtype), attn_implementation=ATTENTION, **common
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model: {path} cannot be loaded: {_first_line(error)}") from None
    return model.to(device)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"model.path: {path} is not a directory; give a local Hugging Face model directory "
            f"(`hf download NAME --local-dir DIR` makes one)"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"model.path: {path} holds no config.json; give a Hugging Face model directory")


def _weight_names(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    from safetensors import safe_open

    single = path / "model.safetensors"
    if not single.is_file():
        raise UserError(f"model: {path} holds no safetensors weights (model.safetensors)")
    with safe_open(str(single), framework="pt") as weights:
        return list(weights.keys())


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end an answer: those of the generation config and the tokenizer's end of sequence."""
    named: Any = model.generation_config.eos_token_id if model.generation_config else None
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({*(named if isinstance(named, list) else [named]), own} - {None}))
