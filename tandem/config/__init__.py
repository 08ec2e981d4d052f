"""Configuration: the typed tree, YAML with overrides, all errors at once."""

from tandem.config.load import dump_config, load_config
from tandem.config.tree import GenerationConfig, ModelConfig, RewardConfig, SftConfig, TrainConfig, TrainerConfig

__all__ = [
    "GenerationConfig",
    "ModelConfig",
    "RewardConfig",
    "SftConfig",
    "TrainConfig",
    "TrainerConfig",
    "dump_config",
    "load_config",
]
