"""What planning asks of a configuration, of whichever command."""

from pathlib import Path

from tandem.config.cluster import RoleName
from tandem.config.model import LoraConfig
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig, has_critic

Planned = TrainConfig | SftConfig
"""The configurations whose memory is known: of `tandem train`, `sft`, `dpo` and `reward-model`."""


def model_paths(config: Planned) -> dict[RoleName, Path]:
    """The roles of a run besides the generation engine, and the directory that each starts from.

    A policy with adapters is its own reference, without them, in one pool.
    """
    if isinstance(config, RewardModelConfig):
        return {"reward_model": config.model.path}
    if isinstance(config, SftConfig):
        compares = isinstance(config, DpoConfig) and config.preference.has_reference and config.model.lora is None
        return dict.fromkeys(("actor", "reference") if compares else ("actor",), config.model.path)
    model, algorithm = config.model, config.algorithm
    paths: dict[RoleName, Path] = {"actor": model.path}
    first = next(iter(config.placement.pools), "")
    roles = config.placement.roles
    apart = roles.get("actor", first) != roles.get("reference", first)
    if algorithm.kl.place != "none" and (model.lora is None or apart):
        paths["reference"] = model.path
    if has_critic(config):
        paths["critic"] = model.critic_path or model.path
    if model.teacher_path is not None:
        paths["teacher"] = model.teacher_path
    if model.reward_model_path is not None:
        paths["reward_model"] = model.reward_model_path
    return paths


def longest_row(config: Planned) -> int:
    if isinstance(config, SftConfig):
        return config.data.max_tokens + isinstance(config, RewardModelConfig)  # the token whose value is the score
    return config.data.max_prompt_tokens + config.generation.max_response_tokens


def learning_roles(config: Planned) -> tuple[RoleName, ...]:
    return ("reward_model",) if isinstance(config, RewardModelConfig) else ("actor", "critic")


def adapters_of(config: Planned, role: str) -> LoraConfig | None:
    """Those that a role learns in the place of its weights."""
    if role not in learning_roles(config):
        return None
    return config.model.critic_lora if role == "critic" else config.model.lora


def item_bytes(config: Planned) -> int:
    return 4 if config.model.dtype == "float32" else 2
