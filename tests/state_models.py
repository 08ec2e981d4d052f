"""Small models with state mixers, of every family that has them: transformers' own, and ours with the same weights."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tandem.models.family_check import _models
from tandem.models.tiny import tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "mamba2": {"expand": 1, "num_heads": 64, "n_groups": 1},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
}
"""By family, what published models say that its class has no default for; an attention layer stays in all but Mamba-2.

The composite qwen3_5 and qwen3_5_moe are loaded as their texts."""
OFTEN = ("lfm2", "nemotron_h", "qwen3_5_text")
"""One of each kind: a convolution alone, Mamba-2, a gated delta rule."""
FAMILIES = [pytest.param(family, marks=() if family in OFTEN else pytest.mark.nightly) for family in OPTIONS]


def config_of(family: str, **options: Any) -> PreTrainedConfig:
    config = tiny(CONFIG_MAPPING[family](**{**OPTIONS[family], **options}))
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 512
    return config


@torch.no_grad()
def pair_of(family: str, **options: Any) -> tuple[Any, Any]:
    """transformers' eager model, and ours."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return _models(config_of(family, **options), trust_remote_code=False)
