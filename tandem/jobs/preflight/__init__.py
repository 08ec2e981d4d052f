"""Every mistake that a configuration, files and installed packages show: found together, before torch is imported.

    configuration, as far as it is sound --> checks --> what is wrong, each with its key and a mend

A check reads what it needs of the configuration. Where that is not sound there is nothing to read
(`config/valid_part.py`): the check ends with what it has found until then, and the others go on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoint.run_dir import check_run_dir
from tandem.config.load import read_config, refuse
from tandem.config.tree import ModelsConfig
from tandem.config.valid_part import found_by
from tandem.errors import UserError
from tandem.jobs.preflight import conversations, data, metrics, models, packages, rewards

Config = TypeVar("Config", bound=ModelsConfig)
_CHECKS_WITH_DATA = (
    data.find_file_mistakes, data.find_row_mistakes, rewards.find_function_mistakes, metrics.find_mistakes,
    conversations.find_user_mistakes,
)  # fmt: skip
_CHECKS = (
    data.find_class_mistakes,
    models.find_directory_mistakes,
    models.find_family_mistakes,
    models.find_lora_mistakes,
    models.find_reward_model_mistakes,
    rewards.find_algorithm_mistakes,
    rewards.find_judge_mistakes,
    packages.find_adapter_package,
    packages.find_cluster_package,
    packages.find_tracking_mistakes,
    packages.find_storage_package,
    packages.find_generation_package,
    packages.find_conversation_package,
    conversations.find_environment_mistakes,
    packages.find_training_package,
)


def load_checked(kind: type[Config], path: Path, overrides: Sequence[str], *, claims_run_dir: bool) -> Config:
    """The configuration in `path`. Raises UserError with every mistake in it and in what it names that can be found
    before torch is imported. `claims_run_dir`: as for `find_mistakes`."""
    read = read_config(kind, path, overrides)
    found = find_mistakes(read.config, whole=not read.problems, claims_run_dir=claims_run_dir)
    refuse(path, read.problems + found)
    return read.config


def find_mistakes(config: ModelsConfig, *, whole: bool = True, claims_run_dir: bool = False) -> list[str]:
    """What is wrong with a valid configuration, or, where it is not `whole`, with the sound part of one that is not.

    `claims_run_dir`: the command will write to `trainer.run_dir`. What only transformers can tell (tokenizers, prompts
    that are too long) is left to `read_inputs`.
    """
    first_rows = data.read_first_rows(config)
    checks = [partial(check, config) for check in _CHECKS]
    checks += [partial(check, config, first_rows) for check in _CHECKS_WITH_DATA]
    checks += [partial(_find_run_dir_mistakes, config)] if claims_run_dir else []
    return [problem for check in checks for problem in found_by(check, whole)]


def _find_run_dir_mistakes(config: Any) -> Iterator[str]:
    try:
        check_run_dir(config)
    except UserError as error:
        key = "" if str(error).startswith("trainer.") else "trainer.run_dir: "
        yield key + str(error).replace("\n", "\n    ")
