"""Whether a model can lie on the ranks as configured: asked before any process starts, without Megatron-Core."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.config.training import MegatronTrainingConfig
from tandem.errors import UserError
from tandem.models.families import rope_kinds

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose bridge is tested."""
_BRIDGED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "is_causal": (True,),
}
"""Keys of a config.json that the bridge does not read, and the values with which it computes all the same."""


def check_packages() -> None:
    """Raises UserError where packages of the engine are not installed."""
    if missing := [name for name in ("megatron", "mbridge") if find_spec(name) is None]:
        raise UserError(
            f"training.type: megatron needs packages that are not installed ({', '.join(missing)}): "
            "pip install -e '.[megatron]' in a clone of Tandem, or on a machine without GPUs scripts/megatron-env"
        )


def check_degrees(path: Path, training: MegatronTrainingConfig, ranks: int) -> None:
    """Raises UserError with everything that is wrong with the model directory `path` on `ranks` ranks."""
    shape = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if shape["model_type"] not in FAMILIES:
        raise UserError(
            f"training.type: megatron has no bridge for model type {shape['model_type']} of {path}, only for "
            f"{', '.join(FAMILIES)}; use training.type: fsdp"
        )
    if left_out := list(_left_out(shape)):
        raise UserError(
            f"model.path: Megatron's bridge leaves out what config.json of {path} says: {', '.join(left_out)}; "
            "use training.type: fsdp"
        )
    if problems := list(_misfits(shape, training, ranks)):
        raise UserError(f"training: {path} cannot lie on {ranks} ranks so: {'; '.join(problems)}")


def _left_out(shape: dict[str, Any]) -> Iterator[str]:
    for key, values in _BRIDGED.items():
        if shape.get(key) is not None and shape[key] not in values:
            yield f"{key}: {shape[key]}"
    for kind in sorted(rope_kinds(shape) - {"default"}):
        yield f"RoPE of type {kind}"


def _misfits(shape: dict[str, Any], training: MegatronTrainingConfig, ranks: int) -> Iterator[str]:
    tensor, stages = training.tensor_parallel, training.pipeline_parallel * training.virtual_pipeline
    experts = shape.get("num_experts", shape.get("num_local_experts", 0))  # as models are published, as they are saved
    dense = training.pipeline_parallel * training.context_parallel * tensor
    expert = training.pipeline_parallel * training.expert_parallel * training.expert_ranks
    for what, number, degrees, divisor in (
        ("ranks", ranks, "tensor_parallel * context_parallel * pipeline_parallel", dense),
        ("ranks", ranks, "expert_tensor_parallel * expert_parallel * pipeline_parallel", expert),
        ("layers", shape["num_hidden_layers"], "pipeline_parallel * virtual_pipeline", stages),
        ("attention heads", shape["num_attention_heads"], "tensor_parallel", tensor),
        ("key-value heads", shape["num_key_value_heads"], "tensor_parallel", tensor),
        ("feed-forward columns", shape["intermediate_size"], "tensor_parallel", 1 if experts else tensor),
        ("expert columns", shape.get("moe_intermediate_size", 0), "expert_tensor_parallel", training.expert_ranks),
        ("experts", experts, "expert_parallel", training.expert_parallel),
    ):
        if number % divisor:
            yield f"{degrees} = {divisor} does not divide {number} {what}"
    if training.expert_parallel > 1 and not experts:
        yield "expert_parallel is for a mixture of experts"
    if experts and tensor > 1 and not training.sequence_parallel:
        yield "tensor_parallel of a mixture of experts needs sequence_parallel: true"
