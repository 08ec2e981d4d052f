"""Model directories -> tokenizers, policies, critics."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.tree import ModelConfig
from tandem.errors import UserError
from tandem.models.attention import ATTENTION


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; UserError when there is none."""
    _check_directory(config.path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.path, **_options(config))
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("special tokens are all it knows")  # what transformers makes of a directory without one
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"model.path: {config.path} has no usable tokenizer ({reason}); "
            "copy tokenizer.json and tokenizer_config.json of the base model into it"
        ) from None
    return tokenizer


def load_policy(config: ModelConfig) -> PreTrainedModel:
    """A causal language model with every dropout at 0, in `model.dtype`, on the GPU if there is one."""
    return _load(transformers.AutoModelForCausalLM, config, config.path)


def load_critic(config: ModelConfig) -> PreTrainedModel:
    """The same body with a value head of one number a token; a directory without such a head gets a zero one."""
    path = config.critic_path or config.path
    return _load(transformers.AutoModelForTokenClassification, config, path, num_labels=1)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end an answer: those of the generation config and the tokenizer's end of sequence."""
    named: Any = model.generation_config.eos_token_id if model.generation_config else None
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({*(named if isinstance(named, list) else [named]), own} - {None}))


def _load(auto_class: Any, config: ModelConfig, path: Path, **shape: Any) -> PreTrainedModel:
    _check_directory(path)
    try:
        model_config = transformers.AutoConfig.from_pretrained(path, **_options(config), **shape)
        dropouts = [name for name in vars(model_config) if name.endswith(("dropout", "pdrop"))]
        model_config.update(dict.fromkeys(dropouts, 0.0))
        model, report = auto_class.from_pretrained(
            path,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **_options(config),
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"model: {path} cannot be loaded: {reason}") from None
    for name in report["missing_keys"]:
        if not name.startswith(("score.", "classifier.")):
            raise UserError(f"model: {path} lacks the weight {name}; give a complete model directory")
        torch.nn.init.zeros_(model.get_parameter(name))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _options(config: ModelConfig) -> dict[str, Any]:
    return {"local_files_only": True, "trust_remote_code": config.trust_remote_code}


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path: {path} is not a local Hugging Face model directory, for it holds no config.json "
            "(`hf download NAME --local-dir DIR` makes one)"
        )
