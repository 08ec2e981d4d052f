"""What does not run yet with a model that sees pictures; docs/pictures.md lists it."""

from collections.abc import Iterator
from typing import Any

from tandem.config.tree import EvalConfig, RolloutConfig, has_critic
from tandem.pictures.model import MODEL_TYPES, model_type

PICTURES_ON_VLLM = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "mistral3", "smolvlm"})
"""Model types that see pictures and whose log-probs on vLLM were compared with the trainer's, and equal."""
ENCODED_ALONE = frozenset({"mistral3"})
"""Those whose tower takes one picture a call, for it attends over all pictures of a call at once."""


def find_picture_mistakes(config: Any) -> Iterator[str]:
    """What a model that sees pictures cannot do yet: a plan refuses it as a run does."""
    family = model_type(config.model.path)
    if family not in MODEL_TYPES:
        return
    training, not_yet = config.training, f"a model that sees pictures ({family}) does not run so yet"
    trains = not isinstance(config, EvalConfig)
    if isinstance(config, RolloutConfig):
        engines = ("native", "vllm") if family in PICTURES_ON_VLLM else ("native",)
        if (engine := config.generation.type) not in engines:
            yield f"generation.type: {engine}: {not_yet}; use {' or '.join(engines)}"
    if trains and training.type != "fsdp":
        yield f"training.type: {training.type}: {not_yet}; use fsdp"
    elif trains and training.compile:
        yield f"training.compile: {not_yet}; leave it out"
    elif trains and training.context_parallel > 1:
        yield f"training.context_parallel: {not_yet}; leave it out"
    elif trains and family in ENCODED_ALONE and config.model.vision_tower != "frozen":
        yield from _find_picture_rank_mistakes(config, not_yet)


def _find_picture_rank_mistakes(config: Any, not_yet: str) -> Iterator[str]:
    """Ranks that share a tower's weights encode together, and this one takes a picture a call. Adapters leave it be."""
    model, critic = config.model, has_critic(config) and not config.model.critic_lora
    for role in (role for role, learns in (("actor", not model.lora), ("critic", critic)) if learns):
        if (ranks := sum(config.nodes_of(role))) > 1:
            yield (
                f"model.vision_tower: train on {ranks} ranks ({role}): {not_yet}, for its tower takes one picture at a "
                "time; use frozen, or one rank"
            )
            return
