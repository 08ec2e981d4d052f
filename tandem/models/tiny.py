"""A model's configuration -> the same family with the same options, small enough to run on a CPU in milliseconds."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from tandem.models.families import PICTURES

HEADS, HEAD_DIM, VOCABULARY = 4, 16, 96
_HIDDEN, _KV_HEADS = HEADS * HEAD_DIM, HEADS // 2
_WINDOW, _PRETRAINED_POSITIONS, _POSITIONS = 4, 8, 64
"""Tokens that a window spans, that RoPE was trained on before it was scaled, and that the model takes: the rows of
`family_check` are longer than the first two, so that both make a difference."""
_MAX_LAYERS = 6
_SIZES = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size"),
    (
        _HIDDEN,
        "hidden_size d_model n_embd dim embedding_dim attention_hidden_size word_embed_proj_dim emb_dim embedding_size"
        " lru_width backbone_hidden_size",
    ),
    (
        48,
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim ffn_hidden_size n_inner"
        " encoder_ffn_dim decoder_ffn_dim shared_intermediate_size expert_ffn_hidden_size dff dim_ff"
        " dense_intermediate_size intermediate_size_mlp feed_forward_size moe_shared_expert_intermediate_size",
    ),
    (
        HEAD_DIM,
        "head_dim attention_head_dim attention_head_size kv_channels v_head_dim dim_head d_head kv_lora_rank"
        " q_lora_rank index_head_dim mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_head_dim"
        " linear_value_head_dim mamba_d_state state_size ssm_state_size swa_head_dim swa_v_head_dim"
        " hidden_size_per_layer_input",
    ),
    (128, "mamba_d_ssm"),
    (
        8,
        "qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_num_heads mamba_n_heads n_mamba_heads chunk_size"
        " mamba_chunk_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"
        " num_decoder_attention_heads num_encoder_attention_heads index_n_heads linear_num_value_heads linear_num_heads"
        " swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num",
    ),
    (
        2,
        "kv_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads index_block_size"
        " index_topk_blocks n_groups mamba_n_groups mamba_ngroups",
    ),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (_WINDOW, "sliding_window attention_chunk_size attention_window_size window_size local_attention index_topk"),
    (_PRETRAINED_POSITIONS, "original_max_position_embeddings"),
    (_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
"""How many layers at the beginning are of another kind."""
_LAST_LAYERS = ("num_kv_shared_layers",)
"""How many layers at the end are."""
_LAYER_NUMBERS = ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids")
"""Which layers are of another kind."""
_KEY_VALUE_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
    "n_head_kv": "n_head",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
"""Each with the heads that share them."""
_DROPPED = ("_name_or_path", "dtype", "transformers_version", "output_attentions")

Values = Mapping[str, Any]


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small model's configuration of the same class.

    Sizes are set by their names, and one layer of each kind stays. What is not a size stays as it is: kinds of layers
    and of RoPE, scalings, caps, biases.
    """
    small = type(config).from_dict(_shrunk(config.to_dict()))
    small.name_or_path = config.name_or_path  # where a family that is not transformers' own has its code
    return small


def _shrunk(values: Values) -> dict[str, Any]:
    count = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)
    count = count or len(values.get("layers_block_type") or ())
    kept = _kept_layers(values, count)
    shrunk = {name: _shrunk_value(name, value, kept, count) for name, value in values.items() if name not in _DROPPED}
    numbers = {name for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    shrunk |= {name: len(kept) for name in numbers.intersection(_LAYERS)}
    shrunk |= {name: sum(i < values[name] for i in kept) for name in numbers.intersection(_FIRST_LAYERS)}
    shrunk |= {name: sum(i >= count - values[name] for i in kept) for name in numbers.intersection(_LAST_LAYERS)}
    for name in numbers.intersection(_KEY_VALUE_HEADS):
        shrunk[name] = _shrunk_kv_heads(values[name], values.get(_KEY_VALUE_HEADS[name]))
    if values.get("model_type") in PICTURES and "vision_config" in values:  # others are loaded without their towers
        shrunk["vision_config"] = _shrunk_tower(values["vision_config"], _merged(values))
        if "vision_feature_layer" in values:
            shrunk["vision_feature_layer"] = _shrunk_feature_layers(values["vision_feature_layer"])
    if "mrope_section" in values:  # of half the dimensions that are rotated
        shrunk["mrope_section"] = [2, 3, 3] if values.get("partial_rotary_factor", 1) == 1 else [2, 1, 1]
    if "expand" in values and "state_size" in values:  # Mamba-2's heads are as many as its width has
        shrunk["num_heads"] = values["expand"] * _HIDDEN // HEAD_DIM
    if "hybrid_layer_ids" in values:  # Zamba2's attention sees two hidden states side by side
        shrunk |= {"attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 2 * _HIDDEN // HEADS}
    if "qk_rope_head_dim" in values:  # what configurations compute from the parts of a head
        shrunk |= {name: size for name, size in (("qk_head_dim", 16), ("head_dim", 8)) if name in values}
    if "dynamic" in str(values.get("rope_parameters")):  # this one has no number of its own for what it was trained on
        shrunk["max_position_embeddings"] = _PRETRAINED_POSITIONS
    return shrunk


def _kept_layers(values: Values, count: int) -> list[int]:
    """One layer of each kind, told apart by every setting that layers have of their own; at least two layers."""
    lists = [
        value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and name not in _LAYER_NUMBERS
    ]
    lists += [[layer in numbers for layer in range(count)] for name in _LAYER_NUMBERS if (numbers := values.get(name))]
    own = values.get("per_layer_config") or {}
    bounds = [values[name] for name in _FIRST_LAYERS if isinstance(values.get(name), int)]
    bounds += [count - values[name] for name in _LAST_LAYERS if isinstance(values.get(name), int)]
    kinds: dict[str, int] = {}
    for layer in range(count):
        listed, bounded = [value[layer] for value in lists], [layer < bound for bound in bounds]
        kinds.setdefault(repr((listed, bounded, own.get(layer), own.get(str(layer)))), layer)
    kept = [*kinds.values()][:_MAX_LAYERS]
    return sorted(kept if len(kept) > 1 or count < 2 else [*kept, next(i for i in range(count) if i not in kept)])


def _shrunk_kv_heads(heads: int, queries: int | None) -> int:
    """Grouped stays grouped, one for all stays one for all, and so does a single head."""
    if heads == 1:
        return 1
    return HEADS if heads == queries else _KV_HEADS


def _shrunk_value(name: str, value: Any, kept: list[int], count: int) -> Any:
    if name == "per_layer_config" and value:
        layers = {int(layer): own for layer, own in value.items()}
        return {place: _shrunk(layers[layer]) for place, layer in enumerate(kept) if layer in layers}
    if isinstance(value, dict):
        return _shrunk(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list):
        return _shrunk_list(name, value, kept, count)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 1:
        return value
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCABULARY - 1)
    return _SIZE_OF.get(name, value)


def _shrunk_tower(values: Values, merged: int) -> dict[str, Any]:
    """Two layers; patches and how they are merged stay, for they say how many tokens a picture takes.

    `merged`: how many patches beside each other become one token.
    """
    small = {name: value for name, value in values.items() if name not in _DROPPED}
    sizes = {
        "depth": 2,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_position_embeddings": 64,
        "out_hidden_size": _HIDDEN,
    }
    small |= {name: size for name, size in sizes.items() if name in values}
    if "embed_dim" in values:  # Qwen2-VL: the tower's width; hidden_size is the text's
        small |= {"embed_dim": 32, "hidden_size": _HIDDEN}
    elif "hidden_size" in values:
        small["hidden_size"] = 32
    if "image_size" in values:  # two tokens high and wide
        patch = values["patch_size"]
        small["image_size"] = (
            [2 * merged * side for side in patch] if isinstance(patch, list | tuple) else 2 * merged * patch
        )
    layers = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}
    return {**small, **{name: kept for name, kept in layers.items() if values.get(name)}}


def _shrunk_feature_layers(layers: int | list[int]) -> int | list[int]:
    """As many layers of the tower as before, counted from the end: there are two."""
    return (
        max(layers, -2)
        if isinstance(layers, int) and layers < 0
        else -1
        if isinstance(layers, int)
        else [-1] * len(layers)
    )


def _merged(values: Values) -> int:
    """Patches along one side of a token, which each family calls otherwise."""
    ratio = values.get("downsample_ratio")
    named = (values.get("spatial_merge_size"), values.get("scale_factor"), ratio and round(1 / ratio))
    return next((size for size in (values["vision_config"].get("spatial_merge_size"), *named) if size), 1)


def _shrunk_list(name: str, value: list[Any], kept: list[int], count: int) -> list[Any]:
    if name in _LAYER_NUMBERS:
        return [place for place, layer in enumerate(kept) if layer in value]
    if name in ("short_factor", "long_factor"):
        return value[: HEAD_DIM // 2]
    if count and len(value) == count:
        return [_SIZE_OF.get(name, value[layer]) for layer in kept]
    if name.endswith("_token_id"):
        return [min(token, VOCABULARY - 1) for token in value]
    return value
