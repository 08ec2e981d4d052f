"""Which command a configuration is for, where nobody says it: by its keys, and by its rows where these tell more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.load import written_tree
from tandem.config.paths import DataPaths
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.data.columns import has_form
from tandem.data.rows import BadRow, Row, read_rows
from tandem.errors import UserError
from tandem.planning.planned import Planned

Job = Literal["train", "sft", "dpo", "reward-model"]
KINDS: Mapping[Job, type[Planned]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward-model": RewardModelConfig,
}
_SECTIONS_OF_TRAIN = TrainConfig.model_fields.keys() - SftConfig.model_fields.keys()
_KEYS_OF_TRAIN = DataConfig.model_fields.keys() - SftDataConfig.model_fields.keys()
_KEYS_OF_ROWS = SftDataConfig.model_fields.keys() - DataConfig.model_fields.keys()


def job_of(path: Path, overrides: Sequence[str] = ()) -> Job:
    """By the keys that no other command has; a reward model's configuration has none, and its rows are pairs.

    What is wrong with the configuration, or with its files, is told when it is loaded.
    """
    tree = written_tree(path, overrides)
    data = tree.get("data")
    data = data if isinstance(data, dict) else {}
    if "preference" in tree:
        return "dpo"
    by_keys: Job = "sft" if _KEYS_OF_ROWS & data.keys() else "train"
    if by_keys == "train" and (_SECTIONS_OF_TRAIN & tree.keys() or _KEYS_OF_TRAIN & data.keys()):
        return "train"
    return _by_row(_first_row(data), by_keys)


def _by_row(row: Row, by_keys: Job) -> Job:
    if has_form(row, "pairs") and not has_form(row, "demonstrations"):
        return "reward-model"
    return "sft" if has_form(row, "demonstrations") and not has_form(row, "prompts") else by_keys


def _first_row(data: Mapping[str, Any]) -> Row:
    """That of the files to train on; an empty one where it cannot be read."""
    mixture = data.get("mixture")
    sets = list(mixture.values()) if isinstance(mixture, dict) else []
    files = data.get("train_files") or next((one.get("files") for one in sets if isinstance(one, dict)), None)
    try:
        paths = TypeAdapter[list[Path]](DataPaths).validate_python(files or [])
        row = next(read_rows(paths[0]))[1] if paths else {}
    except (ValidationError, UserError):
        return {}
    return {} if isinstance(row, BadRow) else row
