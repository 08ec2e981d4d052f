"""Whether models can lie on the ranks of their roles, and what Megatron-Core does not have."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tandem.config.roles import has_critic, model_roles
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import ModelsConfig
from tandem.model_files import MEND, known_config, rope_kinds, rope_of, text_config
from tandem.pictures.vlm_config import sees_pictures

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose bridge to Megatron-Core is tested."""
_BRIDGED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "is_causal": (True,),
}
"""Keys of a config.json that the bridge does not read, and the values with which it computes all the same."""
BRIDGED_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies are the same for rows of all lengths: they are handed to Megatron as numbers."""


def models_lie_on_ranks(config: ModelsConfig) -> Iterator[str]:
    training = config.training
    if training.type == "megatron" and sees_pictures(config.model.path):
        return  # `pictures_run_so` tells it
    for role, path in model_roles(config):
        ranks = sum(config.nodes_of(role))
        if isinstance(training, FsdpTrainingConfig):
            heads = text_config(path).get("num_attention_heads")
            yield from find_fsdp_mistakes(training, heads if isinstance(heads, int) else None, ranks)
        else:
            yield from find_bridge_mistakes(path, training, ranks)


def find_fsdp_mistakes(training: FsdpTrainingConfig, heads: int | None, ranks: int) -> Iterator[str]:
    """Of a model with so many attention heads, where they are known, on `ranks`."""
    size, degree = training.shard_size, training.context_parallel
    if size is not None and ranks % size:
        yield f"training.shard_size: {ranks} ranks cannot be cut into groups of {size}; use a divisor"
    if ranks % degree:
        yield f"training.context_parallel: {ranks} ranks cannot be cut into groups of {degree}; use a divisor"
    if heads is not None and heads % degree:
        yield f"training.context_parallel: {degree} ranks cannot share {heads} attention heads evenly; use a divisor"


def find_bridge_mistakes(path: Path, training: MegatronTrainingConfig, ranks: int) -> Iterator[str]:
    """Of the model in a directory on `ranks`; nothing where its config.json cannot be read, which preflight tells."""
    try:
        yield from _find_bridge_mistakes(path, known_config(path), training, ranks)
    except (KeyError, TypeError) as error:  # a value that is missing, or of another type
        yield f"{path / 'config.json'}: is not complete ({error!r}); {MEND}"


def _find_bridge_mistakes(
    path: Path, described: Mapping[str, Any], training: MegatronTrainingConfig, ranks: int
) -> Iterator[str]:
    if not described:
        return
    if described["model_type"] not in MEGATRON_FAMILIES:
        yield (
            f"training.type: megatron has no bridge for model type {described['model_type']} of {path}, only for "
            f"{', '.join(MEGATRON_FAMILIES)}; use training.type: fsdp"
        )
    elif left_out := list(_left_out(described)):
        yield (
            f"model.path: Megatron's bridge leaves out what config.json of {path} says: {', '.join(left_out)}; "
            "use training.type: fsdp"
        )
    elif problems := list(find_megatron_mistakes(training, described, ranks)):
        yield f"training: {path} cannot lie on {ranks} ranks so: {'; '.join(problems)}"


def _left_out(described: Mapping[str, Any]) -> Iterator[str]:
    for key, values in _BRIDGED.items():
        if described.get(key) is not None and described[key] not in values:
            yield f"{key}: {described[key]}"
    kinds = rope_kinds(described)
    for kind in sorted(kinds.difference(BRIDGED_ROPES)):
        yield f"RoPE of type {kind}"
    share = rope_of(described).get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0))
    if kinds != {"default"} and share != 1:
        yield f"partial_rotary_factor: {share}"


def find_megatron_mistakes(training: MegatronTrainingConfig, described: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Of the model of a config.json, on `ranks`. Raises KeyError and TypeError where that is not complete."""
    tensor, stages = training.tensor_parallel, training.pipeline_parallel * training.virtual_pipeline
    experts = described.get("num_experts", described.get("num_local_experts", 0))  # as published, as saved
    dense = training.pipeline_parallel * training.context_parallel * tensor
    expert = training.pipeline_parallel * training.expert_parallel * training.expert_ranks
    heads = described["num_attention_heads"]
    for what, number, degrees, divisor in (
        ("ranks", ranks, "tensor_parallel * context_parallel * pipeline_parallel", dense),
        ("ranks", ranks, "expert_tensor_parallel * expert_parallel * pipeline_parallel", expert),
        ("layers", described["num_hidden_layers"], "pipeline_parallel * virtual_pipeline", stages),
        ("attention heads", heads, "tensor_parallel", tensor),
        ("key-value heads", described.get("num_key_value_heads", heads), "tensor_parallel", tensor),
        ("feed-forward columns", described["intermediate_size"], "tensor_parallel", 1 if experts else tensor),
        ("expert columns", described.get("moe_intermediate_size", 0), "expert_tensor_parallel", training.expert_ranks),
        ("experts", experts, "expert_parallel", training.expert_parallel),
    ):
        if number % divisor:
            yield f"{degrees} = {divisor} does not divide {number} {what}"
    if training.expert_parallel > 1 and not experts:
        yield "expert_parallel is for a mixture of experts"
    if experts and tensor > 1 and not training.sequence_parallel:
        yield "tensor_parallel of a mixture of experts needs sequence_parallel: true"


def megatron_has_it(config: ModelsConfig) -> Iterator[str]:
    """What is asked of Megatron-Core."""
    training = config.training
    if not isinstance(training, MegatronTrainingConfig):
        return
    for key, lora in {"model.lora": config.model.lora, "model.critic_lora": config.model.critic_lora}.items():
        if lora is not None:
            yield f"{key}: adapters are of training.type: fsdp; take that, or train the whole model"
    chosen = {"training.optimizer": training.optimizer}
    if has_critic(config):
        chosen["algorithm.critic_optimizer"] = cast(Any, config).algorithm.critic_optimizer
    for key, optimizer in chosen.items():
        if optimizer.type != "adamw":
            yield f"{key}.type: {optimizer.type} is of training.type: fsdp; Megatron-Core's optimizer is adamw"
    if training.router_replay:
        yield (
            "training.router_replay: no generation.type returns which experts it chose for a token; leave it out "
            "(an engine of your own that fills Completion.experts can be replayed from Python)"
        )
