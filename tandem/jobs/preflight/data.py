"""Data files: are they there, can they be read, and do their first rows have the columns that the command reads?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tandem.config.tree import DpoConfig, EvalConfig, ModelsConfig, RewardModelConfig, RunConfig, SftConfig
from tandem.data.rows import BadRow, Row, cell, ground_truth_of, read_rows
from tandem.errors import UserError

_ROWS = 2000
"""So many of each file are looked at here; `read_inputs` reads the rest."""
_SHOWN = 3


@dataclass(slots=True)
class Sample:
    """The first rows of the files of one key."""

    rows: list[Row] = field(default_factory=list[Row])
    """The usable ones."""
    bad: list[str] = field(default_factory=list[str])
    """What is wrong with the others."""
    problems: list[str] = field(default_factory=list[str])
    """What is wrong with whole files."""
    complete: bool = True
    """These are all rows."""


def read_samples(config: ModelsConfig) -> dict[str, Sample]:
    """By key: `data.train_files`, `data.val_files`, as far as they are sound."""
    section = getattr(config, "data", None)
    keys = ["val_files"] if isinstance(config, EvalConfig) else ["train_files", "val_files"]
    files = {f"data.{key}": getattr(section, key, None) for key in keys}
    return {key: _read(paths, config) for key, paths in files.items() if paths is not None}


def find_file_mistakes(config: Any, samples: Mapping[str, Sample]) -> Iterator[str]:
    """Files that are not given, not there, or cannot be read."""
    for key, sample in samples.items():
        yield from (f"{key}: {problem}" for problem in sample.problems)
    needed = "val_files" if isinstance(config, EvalConfig) else "train_files"
    if not getattr(config.data, needed):
        yield f"data.{needed}: no file given"


def find_row_mistakes(config: Any, samples: Mapping[str, Sample]) -> Iterator[str]:
    """Rows that cannot be used, where these are not to be skipped."""
    for key, sample in samples.items():
        if sample.bad and config.data.on_bad_row == "error":
            count = len(sample.bad) + len(sample.rows)
            first = "\n      ".join(sample.bad[:_SHOWN])
            yield (
                f"{key}: {len(sample.bad):,} of the first {count:,} rows are bad; mend them, or leave them out with "
                f"data.on_bad_row: skip. The first:\n      {first}"
            )


def find_validation_mistakes(config: Any) -> Iterator[str]:
    if isinstance(config, RunConfig) and config.trainer.eval_every and not cast(Any, config).data.val_files:
        yield f"trainer.eval_every: {config.trainer.eval_every} needs data.val_files, and none is given"


def _read(paths: Sequence[Path], config: ModelsConfig) -> Sample:
    sample = Sample()
    for path in paths:
        rows = read_rows(path)
        try:
            for number, row in islice(rows, _ROWS):
                try:
                    _check_row(row, config)
                except BadRow as error:
                    sample.bad.append(f"{path}, row {number}: {error}")
                else:
                    assert not isinstance(row, BadRow)
                    sample.rows.append(row)
            sample.complete &= next(rows, None) is None
        except UserError as error:
            sample.problems.append(str(error))
            sample.complete = False
    return sample


def _check_row(row: Row | BadRow, config: ModelsConfig) -> None:
    """Raises BadRow where columns are missing, empty or of another type; the datasets look into them."""
    if isinstance(row, BadRow):
        raise row
    if isinstance(config, DpoConfig | RewardModelConfig):
        kind = str if isinstance(row.get("chosen"), str) else list
        cell(row, "chosen", kind)
        cell(row, "rejected", kind)
    elif isinstance(config, SftConfig) and row.get("messages") is not None:
        cell(row, "messages", list)
    else:
        kind = str if isinstance(row.get("prompt"), str) else list
        cell(row, "prompt", kind)
        if isinstance(config, SftConfig):
            cell(row, "completion", kind)
        else:
            ground_truth_of(row)
