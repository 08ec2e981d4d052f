"""Why models and engines cannot lie on the ranks of their roles: what a plan refuses, and a run before it starts."""

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.config.generation import NativeGenerationConfig, ReplicatedGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.config.tree import RolloutConfig, has_critic

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose bridge to Megatron-Core is tested."""


def find_fsdp_mistakes(training: FsdpTrainingConfig, heads: int | None, ranks: int) -> Iterator[str]:
    """Of a model with so many attention heads, where they are known, on `ranks`."""
    size, degree = training.shard_size, training.context_parallel
    if size is not None and ranks % size:
        yield f"training.shard_size: {ranks} ranks cannot be cut into groups of {size}; use a divisor"
    if ranks % degree:
        yield f"training.context_parallel: {ranks} ranks cannot be cut into groups of {degree}; use a divisor"
    if heads is not None and heads % degree:
        yield f"training.context_parallel: {degree} ranks cannot share {heads} attention heads evenly; use a divisor"


def find_megatron_mistakes(training: MegatronTrainingConfig, described: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Of the model of a config.json, on `ranks`."""
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


def find_megatron_option_mistakes(config: Any) -> Iterator[str]:
    """What Megatron-Core does not have, of a configuration of any command that trains."""
    training = config.training
    if not isinstance(training, MegatronTrainingConfig):
        return
    for key, lora in {"model.lora": config.model.lora, "model.critic_lora": config.model.critic_lora}.items():
        if lora is not None:
            yield f"{key}: adapters are of training.type: fsdp; take that, or train the whole model"
    chosen = {"training.optimizer": training.optimizer}
    if has_critic(config):
        chosen["algorithm.critic_optimizer"] = config.algorithm.critic_optimizer
    for key, optimizer in chosen.items():
        if optimizer.type != "adamw":
            yield f"{key}.type: {optimizer.type} is of training.type: fsdp; Megatron-Core's optimizer is adamw"
    if training.router_replay:
        yield (
            "training.router_replay: no generation.type returns which experts it chose for a token; leave it out "
            "(an engine of your own that fills Completion.experts can be replayed from Python)"
        )


def find_engine_mistakes(config: RolloutConfig, sees_pictures: bool) -> Iterator[str]:
    """Where engines in processes of their own cannot share the devices. `sees_pictures`: the model does."""
    generation, nodes = config.generation, config.nodes_of("rollout")
    if isinstance(generation, NativeGenerationConfig):
        return
    degree = generation.tensor_parallel
    if sum(nodes) > 1 and any(ranks % degree for ranks in nodes):
        yield (
            f"generation.tensor_parallel: {degree} does not divide the {' + '.join(map(str, nodes))} ranks of the "
            "rollout's pool, whose neighbours share an engine; use a divisor, or one rank that sees all devices"
        )
    yield from find_sleep_mistakes(generation, config.model, sees_pictures)


def find_sleep_mistakes(
    generation: ReplicatedGenerationConfig, model: ModelConfig, sees_pictures: bool
) -> Iterator[str]:
    """Where engines drop weights that no publish brings back."""
    frozen = sees_pictures and model.vision_tower == "frozen"
    stays = "model.lora" if model.lora else "model.vision_tower: frozen" if frozen else None
    if generation.sleep == "weights" and stays:
        yield f"generation.sleep: weights, but with {stays} no publish fills them again; use cache"
