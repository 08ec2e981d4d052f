"""Megatron-Core's engines for the contract suite; `contract.py` runs it at several ranks, in the layouts named here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config

from tandem.config.model import ModelConfig
from tandem.config.training import MegatronTrainingConfig
from tandem.training.base import TrainEngine
from tandem.training.optimizers.adamw import AdamWConfig

OPTIMIZER = AdamWConfig(lr=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.01)
layout: dict[str, int] = {}
"""Of the engines that are made next."""


models = tempfile.TemporaryDirectory()


@cache
def model_directory(hidden: int, critic: bool) -> Path:
    """Made once, before there are several ranks, of which transformers lets one write."""
    directory = Path(models.name, f"{hidden}{'-critic' * critic}")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        num_labels=1,
        bos_token_id=0,
        eos_token_id=1,
    )
    auto: Any = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)
    return directory


def engine(hidden: int = 16, critic: bool = False, dtype: Any = "float32", checkpointing: bool = False) -> TrainEngine:
    from tandem.training.megatron.engine import MegatronEngine

    training = MegatronTrainingConfig(type="megatron", activation_checkpointing=checkpointing, **layout)
    model = ModelConfig(path=model_directory(hidden, critic), dtype=dtype)
    return MegatronEngine(model, training, OPTIMIZER, total_steps=20, value_head=critic)


ENGINES: dict[str, Callable[[], TrainEngine]] = {
    "megatron-policy-float32": engine,
    "megatron-policy-bfloat16": lambda: engine(dtype="bfloat16"),
    "megatron-policy-checkpointing": lambda: engine(checkpointing=True),
    "megatron-critic": lambda: engine(critic=True),
}
NIGHTLY = ("megatron-policy-float32", "megatron-policy-checkpointing")
"""Of the one on one rank in float32 `contract.py` shows the same on two; layouts.py has recomputed activations, too."""
OTHER_MODEL: dict[str, Callable[[], TrainEngine]] = {
    "megatron-policy-float32": lambda: engine(hidden=32),
    "megatron-critic": lambda: engine(hidden=32, critic=True),
}
