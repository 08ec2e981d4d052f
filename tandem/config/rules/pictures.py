"""What does not run yet with a model that sees pictures; docs/pictures.md lists it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.config.cluster import RoleName
from tandem.config.roles import has_critic
from tandem.config.tree import EvalConfig, ModelsConfig, RolloutConfig, TrainConfig
from tandem.model_files import known_config
from tandem.pictures.vlm_config import ENCODED_ALONE, MODEL_TYPES, PICTURES_ON_VLLM, model_type, sees_pictures

_PICTURE_CUT = (
    "model_type", "image_token_id", "image_token_index", "patch_size", "spatial_merge_size", "image_size",
    "scale_factor", "downsample_ratio",
)  # fmt: skip
"""Of a config.json or its vision_config."""


def pictures_run_so(config: ModelsConfig) -> Iterator[str]:
    family = model_type(config.model.path)
    if family not in MODEL_TYPES:
        return
    not_yet = f"a model that sees pictures ({family}) does not run so yet"
    if isinstance(config, RolloutConfig):
        engines = ("native", "vllm") if family in PICTURES_ON_VLLM else ("native",)
        if (engine := config.generation.type) not in engines:
            yield f"generation.type: {engine}: {not_yet}; use {' or '.join(engines)}"
    if not isinstance(config, EvalConfig):
        yield from _find_training_mistakes(config, family, not_yet)


def _find_training_mistakes(config: ModelsConfig, family: str, not_yet: str) -> Iterator[str]:
    training = config.training
    if training.type != "fsdp":
        yield f"training.type: {training.type}: {not_yet}; use fsdp"
    elif training.compile:
        yield f"training.compile: {not_yet}; leave it out"
    elif training.context_parallel > 1:
        yield f"training.context_parallel: {not_yet}; leave it out"
    elif family in ENCODED_ALONE and config.model.vision_tower != "frozen":
        yield from _find_rank_mistakes(config, not_yet)


def _find_rank_mistakes(config: ModelsConfig, not_yet: str) -> Iterator[str]:
    """Ranks that share a tower's weights encode together, and this one takes a picture a call. Adapters leave it be."""
    model = config.model
    whole: list[RoleName] = [] if model.lora else ["actor"]
    if has_critic(config) and not model.critic_lora:
        whole.append("critic")
    for role in whole:
        if (ranks := sum(config.nodes_of(role))) > 1:
            yield (
                f"model.vision_tower: train on {ranks} ranks ({role}): {not_yet}, for its tower takes one picture at a "
                "time; use frozen, or one rank"
            )
            return


def readers_see_pictures(config: ModelsConfig) -> Iterator[str]:
    """The critic and the teacher read the policy's tokens, those of pictures among them. A reward model may have a
    tokenizer of its own, which is known when that is loaded."""
    model = config.model
    if not sees_pictures(model.path):
        return
    if isinstance(config, TrainConfig) and config.algorithm.served_teacher is not None:
        mend = "give a model.teacher_path"
        yield f"algorithm.teacher: {model.path} sees pictures, and a served teacher is shown none; {mend}"
    for key in ("critic_path", "teacher_path"):
        path = getattr(model, key)
        if path is not None and (problem := sight_mistake(model.path, path)) is not None:
            yield f"model.{key}: {path} {problem}"


def sight_mistake(policy: Path, path: Path) -> str | None:
    """Why a model cannot read the policy's tokens of pictures; None where it can, or there are none."""
    if not sees_pictures(policy) or not known_config(path) or _picture_cut(path) == _picture_cut(policy):
        return None
    what = "cuts pictures into other tokens than the policy" if sees_pictures(path) else "sees no pictures"
    return f"{what}, whose rows may have some; give a model of the policy's family"


def _picture_cut(path: Path) -> dict[str, Any]:
    """What decides on the tokens of a picture that is resized, where a config.json says it."""
    described = known_config(path)
    vision: dict[str, Any] = described.get("vision_config") or {}
    return {key: described.get(key, vision.get(key)) for key in _PICTURE_CUT}
