"""The small files by which a Hugging Face model directory is described."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.stored import DamagedFile, first_mistake, read_json

MEND = "copy the file again"
DESCRIPTIONS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
)  # fmt: skip
"""Those that hold a JSON object where they are there."""
_STATE_FAMILIES = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma
    rwkv xlstm zamba zamba2 zaya"""
STATE_FAMILIES = frozenset(_STATE_FAMILIES.split())
"""Model types with layers that carry a state from token to token."""
STATE_LAYERS = ("linear_attention", "conv", "mamba", "hybrid")
"""What `layer_types` calls such a layer."""
_Count = Annotated[int, Field(gt=0, lt=2**31)]


class _Described(BaseModel):
    """Of a config.json, the keys that are read here by name. A family may have them or not, and has others."""

    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)

    model_type: str | None = None
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: _Count | None = None
    num_hidden_layers: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | list[int] | None = None
    intermediate_size: _Count | list[int] | None = None
    hidden_size: _Count | None = None
    vocab_size: _Count | None = None


class _ModelConfig(_Described):
    architectures: list[str] | None = None
    text_config: _Described | None = None
    vision_config: dict[str, Any] | None = None


class _Index(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)

    weight_map: dict[str, str]


def read_model_config(directory: Path) -> dict[str, Any]:
    """What the directory's config.json holds. Raises DamagedFile where it is none."""
    path = directory / "config.json"
    described = read_json(path, dict[str, Any], MEND)
    try:
        _ModelConfig.model_validate(described)
    except ValidationError as error:
        raise DamagedFile(path, first_mistake(error), MEND) from None
    return described


def known_config(directory: Path) -> dict[str, Any]:
    """What the directory's config.json holds; empty where it cannot be read, which preflight and loading tell."""
    try:
        return read_model_config(directory)
    except DamagedFile:
        return {}


def text_config(directory: Path) -> dict[str, Any]:
    """What `known_config` says of the language model."""
    described = known_config(directory)
    return described.get("text_config") or described


def carries_state(directory: Path) -> bool:
    """Whether layers of the directory's model carry a state from token to token."""
    kinds = text_config(directory).get("layer_types")
    if kinds is not None:
        return any(kind in STATE_LAYERS for kind in kinds)
    return known_config(directory).get("model_type") in STATE_FAMILIES


def rope_of(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of RoPE, as transformers 4 writes it, which is read first, or as 5 does."""
    return described.get("rope_scaling") or described.get("rope_parameters") or {}


def rope_kinds(described: Mapping[str, Any]) -> set[str]:
    """Those of a config.json; layers may have one each."""
    rope = rope_of(described)
    by_layer = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(own.get("rope_type") or own.get("type") or "default") for own in by_layer}


def indexed_files(index: Path) -> set[str]:
    """The names of the files that an index of weights names. Raises DamagedFile."""
    return set(read_json(index, _Index, MEND).weight_map.values())
