"""Data files: are they there, can they be read, and do their first rows have the columns that the command reads?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.config.mixture import TrainSetConfig
from tandem.config.sampler import SamplerKind
from tandem.config.tree import DpoConfig, EvalConfig, ModelsConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.config.validation import ValSetConfig
from tandem.data.classes import dataset_class
from tandem.data.columns import Kind, check_columns
from tandem.data.messages import without_json_text
from tandem.data.rows import BadRow, Row, cell, ground_truth_of, read_rows, without_pictures
from tandem.errors import UserError

_ROWS, _ROWS_OF_ALL = 2000, 40_000
"""So many of each file, and about so many of all files of a key, are looked at here; `read_inputs` reads the rest."""
_SHOWN = 3


@dataclass(slots=True)
class FirstRows:
    """The first rows of the files of one key."""

    usable: list[Row] = field(default_factory=list[Row])
    bad: list[str] = field(default_factory=list[str])
    """What is wrong with the others, a line for each."""
    problems: list[str] = field(default_factory=list[str])
    """What is wrong with whole files."""
    complete: bool = True
    """These are all rows."""


def read_first_rows(config: ModelsConfig) -> dict[str, FirstRows]:
    """By key: `data.train_files`, `data.mixture.<set>.files`, `data.val_files`, `data.val_sets.<set>.files`, as far as
    they are sound."""
    section = getattr(config, "data", None)
    keys = ["val_files"] if isinstance(config, EvalConfig) else ["train_files", "val_files"]
    files = {f"data.{key}": getattr(section, key, None) for key in keys}
    val_sets: Mapping[str, ValSetConfig] = getattr(section, "val_sets", {})
    files |= {f"data.val_sets.{name}.files": getattr(one, "files", None) for name, one in val_sets.items()}
    if not isinstance(config, EvalConfig):
        sets: Mapping[str, TrainSetConfig] = getattr(section, "mixture", {})
        files |= {f"data.mixture.{name}.files": getattr(one, "files", None) for name, one in sets.items()}
    return {key: _read(paths, config) for key, paths in files.items() if paths is not None}


def find_file_mistakes(config: Any, first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    """Files that are not given, not there, or cannot be read."""
    for key, rows in first_rows.items():
        yield from (f"{key}: {problem}" for problem in rows.problems)
    needed, sets = ("val_files", "val_sets") if isinstance(config, EvalConfig) else ("train_files", "mixture")
    own = needed == "train_files" and getattr(config.data, "dataset", None)
    if not (own or getattr(config.data, needed) or getattr(config.data, sets, None)):
        yield f"data.{needed}: no file given; name some, or sets of data.{sets}"


def find_class_mistakes(config: Any) -> Iterator[str]:
    """Classes of the user's own for rows and for their order. It imports their modules, and makes nothing of them."""
    if not isinstance(config, TrainConfig):
        return
    data, sampler = config.data, getattr(config.data, "sampler", None)  # absent where unsound
    if getattr(data, "dataset", None):
        try:
            dataset_class(str(data.dataset))
        except UserError as error:
            yield str(error)
    if isinstance(sampler, SamplerKind):
        yield from sampler.find_mistakes()


def find_row_mistakes(config: Any, first_rows: Mapping[str, FirstRows]) -> Iterator[str]:
    """Rows that cannot be used, where these are not to be skipped."""
    for key, rows in first_rows.items():
        if rows.bad and config.data.on_bad_row == "error":
            count = len(rows.bad) + len(rows.usable)
            listed = "\n      ".join(rows.bad[:_SHOWN])
            yield (
                f"{key}: {len(rows.bad):,} of the first {count:,} rows are bad; mend them, or leave them out with "
                f"data.on_bad_row: skip. The first:\n      {listed}"
            )


def _read(paths: Sequence[Path], config: ModelsConfig) -> FirstRows:
    first = FirstRows()
    of_each = min(_ROWS, _ROWS_OF_ALL // max(1, len(paths)) + 1)
    for path in paths:
        rows = read_rows(path)
        try:
            for number, row in islice(rows, of_each):
                try:
                    first.usable.append(_checked(row, config, path))
                except BadRow as error:
                    first.bad.append(f"{path}, row {number}: {error}")
            first.complete &= next(rows, None) is None
        except UserError as error:
            first.problems.append(str(error))
            first.complete = False
    return first


def _checked(row: Row | BadRow, config: ModelsConfig, path: Path) -> Row:
    """Raises BadRow where columns are missing, empty or of another type; the datasets look into them."""
    if isinstance(row, BadRow):
        raise row
    kind = _kind_of(config)
    check_columns(row, kind, path)
    row = without_json_text(row)
    if kind == "rated" and (row.get("label") is not None or row.get("chosen") is None):
        cell(row, "label", bool)
    elif kind in ("pairs", "rated"):
        of = str if isinstance(row.get("chosen"), str) else list
        cell(row, "chosen", of, blank=True)
        cell(row, "rejected", of, blank=True)
    elif kind == "demonstrations" and row.get("messages") is not None:
        cell(row, "messages", list)
    else:
        of = str if isinstance(row.get("prompt"), str) else list
        cell(row, "prompt", of)
        if kind == "demonstrations":
            cell(row, "completion", of, blank=True)
        else:
            ground_truth_of(row)
    return without_pictures(row)


def _kind_of(config: ModelsConfig) -> Kind:
    if isinstance(config, DpoConfig):
        return "rated" if getattr(config.preference, "loss", None) == "kto" else "pairs"  # absent where unsound
    if isinstance(config, RewardModelConfig):
        return "pairs"
    return "demonstrations" if isinstance(config, SftConfig) else "prompts"
