"""Data files -> numbered rows, and which of the known row formats a row has."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.errors import UserError

Row = dict[str, Any]


class BadRow(Exception):
    """One row that cannot be used. `reason` is the same for all rows with this fault; `detail` is this row's own."""

    def __init__(self, column: str | None, reason: str, detail: str = ""):
        super().__init__(column, reason, detail)
        self.column = column
        self.reason = reason
        self.detail = detail

    @property
    def fault(self) -> str:
        """What is counted: column and reason."""
        return self.reason if self.column is None else f"column `{self.column}` {self.reason}"

    def __str__(self) -> str:
        return f"{self.fault} ({self.detail})" if self.detail else self.fault


class RowFormat(Enum):
    """The known row formats, each with the columns that tell it from the others."""

    VERL = ("verl rows", ("prompt", "data_source"))
    PROMPT = ("TRL rows with `prompt`", ("prompt",))
    PROMPT_COMPLETION = ("`prompt` + `completion` rows", ("prompt", "completion"))
    MESSAGES = ("`messages` rows", ("messages",))

    def __init__(self, title: str, columns: tuple[str, ...]):
        self.title = title
        self.columns = columns


def detect_format(row: Row, accepted: Sequence[RowFormat]) -> RowFormat:
    """The first of `accepted` whose columns the row has (null counts as absent). Raises BadRow."""
    for row_format in accepted:
        if all(row.get(column) is not None for column in row_format.columns):
            return row_format
    missing = {kind: [column for column in kind.columns if row.get(column) is None] for kind in accepted}
    nearest = min(accepted, key=lambda kind: (len(missing[kind]), -len(kind.columns)))
    needed = ", or ".join(kind.title for kind in accepted)
    raise BadRow(missing[nearest][0], "is missing", f"needed are {needed}; the row has {', '.join(row) or 'nothing'}")


def read_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Yield (row number, row) of a .parquet, .jsonl or .json (one object a line) file, the latter two also as .gz.

    Numbers count from 1; in JSON-lines they are line numbers. A line that is no JSON object comes as a BadRow.
    Raises UserError when the file as a whole cannot be read, or holds no rows.
    """
    read = _reader(path)
    number = 0
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; write it again, or take it out of the configuration")
        for number, row in read(path):
            yield number, row
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file (relative paths start at {Path.cwd()})") from error
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        place = f"after row {number}: " if number else ""
        raise UserError(
            f"{path}: {place}the file is damaged or cannot be read ({error}); make or copy it again"
        ) from error
    if number == 0:
        raise UserError(f"{path}: the file holds no rows; write it again, or take it out of the configuration")


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[int, Row | BadRow]]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _read_parquet
    if name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        return _read_json_lines
    raise UserError(f"{path}: unknown file ending; data files end in .parquet, .jsonl, .json, .jsonl.gz or .json.gz")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    with pq.ParquetFile(path) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
        yield from enumerate(chain.from_iterable(batches), start=1)


def _read_json_lines(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | BadRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(None, "the line is not valid JSON", str(error))
    if not isinstance(value, dict):
        return BadRow(None, "the line is not a JSON object {…}", f"it holds a {type(value).__name__}")
    return value
