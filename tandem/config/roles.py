"""The models of a run, as far as a configuration shows it: what an algorithm of the user's own needs is known when its
class is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.config.algorithms import MayHaveCriticConfig, OwnAlgorithmConfig
from tandem.config.cluster import RoleName
from tandem.config.tree import DpoConfig, ModelsConfig, RewardModelConfig, RolloutConfig, SftConfig, TrainConfig


def model_roles(config: ModelsConfig) -> Iterator[tuple[RoleName, Path]]:
    """The roles on the training engine and the directory that each starts from, in the order in which they are made.

    A policy with adapters is its own reference, without them, in one pool.
    """
    model = config.model
    if isinstance(config, RewardModelConfig):
        yield "reward_model", model.path
    elif isinstance(config, SftConfig | TrainConfig):
        yield "actor", model.path
    if isinstance(config, DpoConfig) and config.preference.has_reference and model.lora is None:
        yield "reference", model.path
    if isinstance(config, TrainConfig):
        yield from _learned_with(config)
    if isinstance(config, RolloutConfig) and model.reward_model_path is not None:
        yield "reward_model", model.reward_model_path


def _learned_with(config: TrainConfig) -> Iterator[tuple[RoleName, Path]]:
    model = config.model
    own = model.lora is None or config.placement.apart("actor", "reference")
    if config.algorithm.kl.place != "none" and own:
        yield "reference", model.path
    if has_critic(config):
        yield "critic", model.critic_path or model.path
    if model.teacher_path is not None:
        yield "teacher", model.teacher_path


def has_critic(config: Any) -> bool:
    """Whether a critic is one of the roles."""
    if not isinstance(config, TrainConfig):
        return False
    return isinstance(config.algorithm, MayHaveCriticConfig) and not isinstance(config.algorithm, OwnAlgorithmConfig)
