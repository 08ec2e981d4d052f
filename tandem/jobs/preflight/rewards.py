"""Reward functions, and algorithms of the user's own: are they there, and do rows have what they need?"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.tree import RolloutConfig, TrainConfig
from tandem.data.preprocess.recognised import command_for
from tandem.data.rows import Row, ground_truth_of
from tandem.errors import UserError
from tandem.jobs.preflight.data import FirstRows
from tandem.reward.functions import check_functions
from tandem.reward.judging import Rubric, make_parser
from tandem.types import Prompt


def find_function_mistakes(config: Any, first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    """What `check_functions` finds with the first rows of the data. It imports the modules of the functions."""
    if not isinstance(config, RolloutConfig):
        return
    prompts = {key: [_prompt(row) for row in rows.usable] for key, rows in first_rows.items()}
    sources = unnamed_sources(config, prompts)
    try:
        check_functions(config.reward, sources, prompts)
    except UserError as error:
        yield str(error)
        if "default" in sources:
            yield from _as_published(first_rows)


def _as_published(first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    """Files whose rows have a prompt, and their data set's ground truth in columns that only `tandem data` reads."""
    for key, rows in first_rows.items():
        first = next((row for row in rows.usable if not row.get("data_source")), None)
        if first is not None and (command := command_for(first, "FILE")):
            yield f"{key}: rows as they are published have no ground truth that is read; it is made by: {command}"


def unnamed_sources(config: RolloutConfig, prompts: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """The sources of rows whose answers a built-in function has to score, as the configuration names none."""
    if config.reward.functions:
        return []
    return sorted({prompt.data_source for key, some in prompts.items() if config.needs_reward(key) for prompt in some})


def find_judge_mistakes(config: Any) -> Iterator[str]:
    """What a judge is told and how it is read. It imports the parser's module."""
    if not isinstance(config, RolloutConfig) or config.reward.judge is None:
        return
    for make in (Rubric, make_parser):
        try:
            make(config.reward.judge)
        except UserError as error:
            yield str(error)


def find_algorithm_mistakes(config: Any) -> Iterator[str]:
    """Where the class of an `algorithm.type` of the user's own is not; `make_algorithm` looks at the class itself."""
    if not isinstance(config, TrainConfig) or ":" not in config.algorithm.type:
        return
    place, _, name = config.algorithm.type.rpartition(":")
    if not place.endswith(".py"):
        package = place.partition(".")[0]
        if not package or find_spec(package) is None:
            yield f"algorithm.type: {place}: there is no package {package!r}; install it, or give a file of yours"
        return
    try:
        module = ast.parse(Path(place).read_text(encoding="utf-8"))
    except OSError as error:
        yield f"algorithm.type: {config.algorithm.type}: there is no file {place} ({error.strerror})"
    except (SyntaxError, ValueError) as error:
        yield f"algorithm.type: {place} is no Python: {error}"
    else:
        names = _bound_names(module)
        if name not in names and "*" not in names:
            close = get_close_matches(name, names, 1)
            yield f"algorithm.type: {place} has no class {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _bound_names(module: ast.Module) -> set[str]:
    """Names that a module may have, too many rather than too few; with `*` any."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _prompt(row: Row) -> Prompt:
    """A prompt that was not tokenised; rewards read its row."""
    source = row.get("data_source")
    text = row.get("prompt")
    return Prompt(
        index=0,
        token_ids=np.zeros(0, dtype=np.int32),
        text=text if isinstance(text, str) else "",
        data_source=source if isinstance(source, str) else "default",
        ground_truth=ground_truth_of(row),
        row=row,
    )
