"""`trainer.best_metric`: does the run record such a metric?"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tandem.config.roles import has_critic
from tandem.config.tree import DpoConfig, RewardModelConfig, RunConfig, SftConfig, TrainConfig
from tandem.config.validation import ValSetConfig
from tandem.jobs.preflight.data import FirstRows
from tandem.tracking import names


def find_mistakes(config: Any, first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    if not isinstance(config, RunConfig) or (metric := config.trainer.best_metric) is None:
        return
    validation = metric.startswith("val/")
    own_algorithm = isinstance(config, TrainConfig) and ":" in config.algorithm.type
    if own_algorithm and not validation:
        return  # it may have metrics of its own
    patterns = _validation_names(config, first_rows) if validation else _step_names(config)
    if not any(_matches(metric, pattern) for pattern in patterns):
        close = get_close_matches(metric, patterns, 1, cutoff=0.5 if validation else 0.7)
        mend = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(patterns)}"
        yield f"trainer.best_metric: {metric!r} is no metric of this run; {mend}"
    elif validation and config.trainer.eval_every == 0:
        yield f"trainer.best_metric: {metric!r} is measured in validation; set trainer.eval_every"


def _step_names(config: RunConfig) -> Sequence[str]:
    if isinstance(config, TrainConfig):
        critic = names.OF_THE_CRITIC if has_critic(config) else ()
        return (*names.OF_ANSWERS, *names.OF_THE_ACTOR, *critic, *names.OF_EVERY_RUN)
    if isinstance(config, DpoConfig):
        return (*names.OF_DPO, *names.OF_EVERY_RUN)
    if isinstance(config, RewardModelConfig):
        return (*names.OF_REWARD_MODELS, *names.OF_EVERY_RUN)
    return (*names.OF_SFT, *names.OF_EVERY_RUN)


def _validation_names(config: RunConfig, first_rows: Mapping[str, FirstRows]) -> Sequence[str]:
    if isinstance(config, DpoConfig | RewardModelConfig):
        return names.OF_PAIRED_VALIDATION
    if isinstance(config, SftConfig):
        return names.OF_SUPERVISED_VALIDATION
    assert isinstance(config, TrainConfig)
    sets: Mapping[str, ValSetConfig] = getattr(config.data, "val_sets", {})  # absent where unsound
    usual, without = config.generation.eval, sets and getattr(config.data, "val_files", None) == []
    found = [] if without else _names_of_a_set(first_rows.get("data.val_files"), "", usual.samples)
    for name, one in sets.items():
        rows = first_rows.get(f"data.val_sets.{name}.files")
        found += _names_of_a_set(rows, f"{name}/", one.sampling(usual).samples)
    return found


def _names_of_a_set(rows: FirstRows | None, begin: str, answers: int) -> list[str]:
    """The metrics of validation rows of one set; `begin` stands before their sources."""
    known = rows is not None and rows.complete and rows.usable
    sources = sorted({row.get("data_source") or "default" for row in rows.usable}) if rows and known else ["<source>"]
    return [
        name.replace("<source>", begin + source).replace("<N>", str(answers))
        for source in sources
        for name in names.OF_VALIDATION
        if answers > 1 or not re.search("best@|maj@", name)
    ]


def _matches(metric: str, pattern: str) -> bool:
    parts = re.split(r"<\w+>", pattern)
    return re.fullmatch(".+".join(map(re.escape, parts)), metric) is not None
