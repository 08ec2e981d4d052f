"""Why models and engines cannot lie on the ranks of their roles: what a plan refuses, and a run before it starts."""

from collections.abc import Iterator

from tandem.config.generation import NativeGenerationConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import RolloutConfig


def find_fsdp_mistakes(training: FsdpTrainingConfig, heads: int | None, ranks: int) -> Iterator[str]:
    """Of a model with so many attention heads, where they are known, on `ranks`."""
    size, degree = training.shard_size, training.context_parallel
    if size is not None and ranks % size:
        yield f"training.shard_size: {ranks} ranks cannot be cut into groups of {size}; use a divisor"
    if ranks % degree:
        yield f"training.context_parallel: {ranks} ranks cannot be cut into groups of {degree}; use a divisor"
    if heads is not None and heads % degree:
        yield f"training.context_parallel: {degree} ranks cannot share {heads} attention heads evenly; use a divisor"


def find_engine_mistakes(config: RolloutConfig) -> Iterator[str]:
    """Where engines in processes of their own cannot share the devices."""
    generation, nodes = config.generation, config.nodes_of("rollout")
    if isinstance(generation, NativeGenerationConfig):
        return
    degree = generation.tensor_parallel
    if sum(nodes) > 1 and any(ranks % degree for ranks in nodes):
        yield (
            f"generation.tensor_parallel: {degree} does not divide the {' + '.join(map(str, nodes))} ranks of the "
            "rollout's pool, whose neighbours share an engine; use a divisor, or one rank that sees all devices"
        )
    if generation.sleep == "weights" and config.model.lora is not None:
        yield "generation.sleep: weights, but with model.lora no publish fills them again; use cache"
