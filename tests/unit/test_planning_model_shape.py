"""Sizes from a config.json are those of the model that transformers makes of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.errors import UserError
from tandem.models.attention import PackedRows
from tandem.models.mixing import StateMixer, mixers_of
from tandem.planning.model_shape import FAMILIES, read_shape, shape_of
from tandem.planning.tower_shape import TOWERS
from tests.state_models import pair_of

SMALL = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "vocab_size": 99,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
STATES = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
}  # fmt: skip
MIXTURE = {**GROUPED, "head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {**GROUPED, "sliding_window": 32, "head_dim": 24}),
    ("phi3", {**GROUPED, "pad_token_id": 0, "sliding_window": 8}),
    ("seed_oss", {**GROUPED, "head_dim": 16}),
    ("olmo2", {**GROUPED, "pad_token_id": 0}),
    ("qwen2", GROUPED),
    ("qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    ("qwen3", {**GROUPED, "head_dim": 24, "tie_word_embeddings": True}),
    ("gemma2", {**GROUPED, "head_dim": 24, "sliding_window": 32}),
    ("gemma3_text", {**GROUPED, "head_dim": 24, "sliding_window": 32}),
    ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**MIXTURE, "num_experts": 8, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**MIXTURE, "num_experts": 8, "mlp_only_layers": [0]}),
    ("qwen2_moe", {**MIXTURE, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    ("qwen3_5_text", {**GROUPED, **STATES, "head_dim": 24}),
    ("qwen3_next", {**MIXTURE, **STATES, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    ("qwen3_5_moe_text", {**MIXTURE, **STATES, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    ("gpt_oss", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}),
    ("glm4_moe", {**MIXTURE, "n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True,
      "n_group": 1, "first_k_dense_replace": 1}),
    (
        "deepseek_v3",
        {**MIXTURE, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 20,
         "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14, "num_key_value_heads": 6},
    ),
]  # fmt: skip


def test_each_family_has_a_case() -> None:
    """Those that see pictures in test_planning_tower.py."""
    assert {family for family, _ in CASES} == set(FAMILIES) - set(TOWERS)


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_parameters_windows_and_keys_are_those_of_transformers(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[family](**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for index, layer in enumerate(model.model.layers):
        assert shape.layer(index) == sum(parameter.numel() for parameter in layer.parameters()), index
        if shape.mixes and shape.mixes[index]:
            assert not hasattr(layer, "self_attn")
            continue
        window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        if family in ("mistral", "phi3", "qwen2", "gemma2", "gemma3_text", "gpt_oss"):
            assert shape.windows[index] == window, index
    assert shape.tied == config.tie_word_embeddings
    attention = model.model.layers[-1].self_attn
    if family not in ("phi3", "deepseek_v3"):
        assert shape.attention.key == attention.k_proj.out_features
        assert shape.attention.query == attention.o_proj.in_features


def test_a_published_config_without_what_transformers_adds_means_the_same() -> None:
    """Qwen3-30B-A3B's and gemma-2's, with the keys that were published."""
    published = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
        "sliding_window": None, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    shape = shape_of(published)
    assert round(shape.parameters / 1e9, 2) == 30.53
    assert round(shape.active_parameters / 1e9, 2) == 3.04  # the published 3.3 count the embedding, too
    assert shape.kv_bytes_per_token() == 48 * 2 * 4 * 128 * 2
    gemma = {
        "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000,
        "sliding_window": 4096,
    }  # fmt: skip
    shape = shape_of(gemma)
    assert round(shape.parameters / 1e9, 2) == 2.61
    assert shape.windows[:3] == (4096, None, 4096)
    assert shape.kv_bytes(8192) == 13 * (4096 + 8192) * 2 * 4 * 256 * 2


def test_states_are_those_that_the_native_engine_keeps(tmp_path: Path) -> None:
    """Of a row, as it is before its first token; keys and values are of the layers with attention alone."""
    _, ours = pair_of("qwen3_next")
    ours.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    plan = PackedRows(np.array([0, 5]))
    held: list[int] = []
    for mixer in mixers_of(ours):
        hidden = torch.zeros(1, 5, ours.config.hidden_size)
        held.append(plan.mix_and_keep(StateMixer(mixer, 0), hidden)[1].nbytes)
    assert shape.state_bytes(item_bytes=4) == sum(held) and len(held) == sum(shape.mixes)
    assert shape.kv_bytes(10) == 10 * shape.kv_bytes_per_token() + shape.state_bytes()
    published = {**CONFIG_MAPPING["qwen3_next"]().to_dict(), "layer_types": None}
    assert shape_of(published).state_bytes() == 36 * (2 * 8192 * 4 + 4 * 32 * 128 * 128)
    assert shape_of(published).kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json, which is what planning needs of a model"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match=r"models of type 'mamba' are; it knows deepseek_v3, "):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "llama"}}))
    with pytest.raises(UserError, match=r"how large the tower of models of type 'llava' is"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"config.json is not complete \(KeyError\('hidden_size'\)\)"):
        read_shape(tmp_path)
