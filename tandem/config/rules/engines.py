"""Engines that generate: which devices they share, and whose weights they keep meanwhile."""

from collections.abc import Iterator

from tandem.config.generation import NativeGenerationConfig, ReplicatedGenerationConfig, VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.tree import RolloutConfig
from tandem.pictures.vlm_config import sees_pictures


def judge_has_devices(config: RolloutConfig) -> Iterator[str]:
    """Engines in processes of their own take a share of each device that nobody else has counted."""
    engine = config.reward.judge.generation.type if config.reward.judge else "native"
    shares = any(not config.placement.apart("judge", role) for role in ("actor", "rollout"))
    if config.model.judge_path and engine != "native" and shares:
        yield (
            f"placement: roles: reward.judge.generation.type: {engine} takes devices of its own; give judge a pool in "
            "placement.roles, or use native"
        )


def reward_model_leaves_weights(config: RolloutConfig) -> Iterator[str]:
    """While a reward model scores on the engine's devices the engine sleeps, and may have to answer again after."""
    drops_weights = config.generation.type != "native" and config.generation.sleep == "weights"
    if drops_weights and config.model.reward_model_path and not config.placement.apart("reward_model", "rollout"):
        yield (
            "placement: roles: model.reward_model_path scores on the engine's devices, which must keep its weights "
            "meanwhile; set generation.sleep: cache, or place reward_model on a pool of its own"
        )


def engines_share_ranks(config: RolloutConfig) -> Iterator[str]:
    """Neighbours share an engine in processes of its own."""
    generation, nodes = config.generation, config.nodes_of("rollout")
    if isinstance(generation, NativeGenerationConfig):
        return
    degree = generation.tensor_parallel
    if sum(nodes) > 1 and any(ranks % degree for ranks in nodes):
        yield (
            f"generation.tensor_parallel: {degree} does not divide the {' + '.join(map(str, nodes))} ranks of the "
            "rollout's pool, whose neighbours share an engine; use a divisor, or one rank that sees all devices"
        )


def weights_come_back(config: RolloutConfig) -> Iterator[str]:
    if not isinstance(config.generation, NativeGenerationConfig):
        yield from find_sleep_mistakes(config.generation, config.model)


def find_sleep_mistakes(generation: ReplicatedGenerationConfig, model: ModelConfig) -> Iterator[str]:
    """Where engines drop weights that no publish brings back."""
    frozen = model.vision_tower == "frozen" and sees_pictures(model.path)
    stays = "model.lora" if model.lora else "model.vision_tower: frozen" if frozen else None
    if generation.sleep == "weights" and stays:
        yield f"generation.sleep: weights, but with {stays} no publish fills them again; use cache"


def quantization_is_said_once(config: RolloutConfig) -> Iterator[str]:
    generation = config.generation
    if isinstance(generation, VllmGenerationConfig) and generation.quantization is not None:
        twice = [key for key in ("quantization", "quantization_config", "dtype") if key in generation.engine_args]
        if twice:
            yield (
                f"generation.engine_args.{twice[0]}: generation.quantization: {generation.quantization} says it, too; "
                "leave one of them out"
            )
