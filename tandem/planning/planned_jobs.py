"""Which command a configuration is for, where nobody says it: by its keys."""

from collections.abc import Mapping
from typing import Any

from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.job import Job
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.planning.planned import Planned

KINDS: Mapping[Job, type[Planned]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward-model": RewardModelConfig,
}
_SECTIONS_OF_TRAIN = TrainConfig.model_fields.keys() - SftConfig.model_fields.keys()
_KEYS_OF_TRAIN = DataConfig.model_fields.keys() - SftDataConfig.model_fields.keys()
_KEYS_OF_ROWS = SftDataConfig.model_fields.keys() - DataConfig.model_fields.keys()


def jobs_of(tree: Mapping[str, Any]) -> tuple[Job, ...]:
    """The commands whose configuration has such sections and keys of `data`, the likeliest one first."""
    data = tree.get("data")
    keys = data.keys() if isinstance(data, dict) else set[str]()
    if "preference" in tree:
        return ("dpo",)
    if _KEYS_OF_ROWS & keys:
        return "sft", "reward-model"
    return ("train",) if _SECTIONS_OF_TRAIN & tree.keys() or _KEYS_OF_TRAIN & keys else ("train", "sft", "reward-model")
