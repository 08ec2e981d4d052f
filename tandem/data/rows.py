"""Data files -> numbered rows -> checked cells."""

import gzip
import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.errors import UserError
from tandem.files import ROW_ENDINGS
from tandem.stored import parse_json

Row = dict[str, Any]
_PICTURED = ("images", "image", "videos")
"""Columns of pictures."""
OF_MESSAGES = ("prompt", "messages", "completion", "chosen", "rejected", "tools")
"""Columns of messages, and of what they speak of."""
_MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which some editors write at the beginning of a file."""
ROWS_PER_CHUNK = 1024
_FIRST_LINE_S, _LINE_S = 2.0, 10.0
"""Until the first line of progress, and between two."""
_SHORT = 4096
"""Texts below this length stay where pictures go: paths, and keys of stored ones."""
Value = TypeVar("Value")


class BadRow(Exception):
    """A row that cannot be used; the message names the column and the reason."""


def content_digest(path: Path) -> str:
    """SHA-256 of a file. Raises UserError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file (relative paths start at {Path.cwd()})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def read_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Row number, from 1 (the line number in JSON-lines), and row of each row of a parquet or JSON-lines file.

    A line that is no JSON object comes as a BadRow. Raises UserError when the file cannot be read, or holds no rows.
    """
    for chunk in read_chunks(path):
        yield from chunk.rows()


class Pace:
    """When a long read prints a line of progress: after 2 seconds, then every 10."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._due = self._start + _FIRST_LINE_S

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        """Where it is, the caller prints a line, and the next one is due in ten seconds."""
        if time.monotonic() <= self._due:
            return False
        self._due = time.monotonic() + _LINE_S
        return True


class Chunk(NamedTuple):
    """Neighbouring rows as they are in a file, which another process can take apart."""

    path: Path
    first: int
    """The number of the first one."""
    content: list[Any] | pa.RecordBatch
    """Lines of JSON, entries of a list of JSON, or a batch."""

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """Numbers and rows, without empty lines. Raises UserError where a batch holds what is no value of its type."""
        try:
            listed: list[Any] = self.content if isinstance(self.content, list) else self.content.to_pylist()
        except (ValueError, pa.ArrowException) as error:
            raise unreadable(self.path, self.first - 1, error) from error
        for number, row in enumerate(listed, start=self.first):
            if not isinstance(self.content, list):
                yield number, {name: without_nulls(v) if name in OF_MESSAGES else v for name, v in row.items()}
            elif not isinstance(row, bytes):
                yield number, _object(row, "the entry")
            elif row.strip():
                yield number, _parse_line(row)


def without_nulls(value: Any) -> Any:
    """Parquet gives every struct of a column the keys of all: those that are null there were absent."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def unreadable(path: Path, number: int, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read after row {number} ({error}); make or copy the file again")


def read_chunks(path: Path) -> Iterator[Chunk]:
    """The rows of a file, about `ROWS_PER_CHUNK` at a time. Raises UserError as `read_rows`."""
    name = path.name.lower()
    if not name.endswith(ROW_ENDINGS):
        raise UserError(f"{path}: data files end in .parquet, .jsonl or .json (one object a line), .jsonl.gz, .json.gz")
    number, has_rows = 0, False
    try:
        for content in _read_parquet(path) if name.endswith(".parquet") else _read_json_lines(path):
            has_rows = has_rows or _has_rows(content)
            yield Chunk(path, number + 1, content)
            number += len(content)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file (relative paths start at {Path.cwd()})") from error
    except (OSError, EOFError, ValueError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise unreadable(path, number, error) from error
    if not has_rows:
        raise UserError(f"{path}: the file holds no rows; write it again, or take it out of the configuration")


def _has_rows(content: list[Any] | pa.RecordBatch) -> bool:
    return not isinstance(content, list) or any(not isinstance(row, bytes) or row.strip() for row in content)


def _read_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        pictured = any(_may_hold_pictures(field) for field in file.schema_arrow)
        yield from file.iter_batches(batch_size=16 if pictured else ROWS_PER_CHUNK)


def _may_hold_pictures(field: "pa.Field[Any]") -> bool:
    """A column of pictures, or of messages with parts that hold some."""
    return field.name in _PICTURED or any(word in str(field.type) for word in ("binary", "image", "video"))


def _read_json_lines(path: Path) -> Iterator[list[Any]]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as lines:
        first = lines.readline().removeprefix(_MARK)
        if _is_json(path):
            first = next(chain([first] if first.strip() else [], (line for line in lines if line.strip())), b"")
        if _is_json(path) and (first.strip() == b"{" or first.lstrip().startswith(b"[")):  # one object, or a list
            value = parse_json(first + lines.read())
            whole: list[Any] = value if isinstance(value, list) else [value]
            yield from (whole[at : at + ROWS_PER_CHUNK] for at in range(0, len(whole), ROWS_PER_CHUNK))
            return
        all_lines = chain([first], lines)
        while chunk := list(islice(all_lines, ROWS_PER_CHUNK)):
            yield chunk


def _is_json(path: Path) -> bool:
    return path.name.lower().endswith((".json", ".json.gz"))


def _parse_line(line: bytes) -> Row | BadRow:
    try:
        value = parse_json(line)
    except ValueError as error:
        return BadRow(f"the line is not valid JSON: {error}")
    return _object(value, "the line")


def _object(value: Any, what: str) -> Row | BadRow:
    try:
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        return BadRow(f"{what} is not valid JSON: {error}")
    return value if isinstance(value, dict) else BadRow(f"{what} holds a {type(value).__name__}, not an object {{…}}")


def without_pictures(row: Row) -> Row:
    """The row for those who keep many and look at no picture: what pictures are made of is null, in their columns and
    in parts of messages, but for short texts."""
    return {name: _short(value) if name in _PICTURED else _without_parts(value) for name, value in row.items()}


def _short(value: Any) -> Any:
    return value if isinstance(value, str) and len(value) < _SHORT else None


def _without_parts(messages: Any) -> Any:
    """A column's value; where it is messages, without what their parts show."""
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": [_light(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _light(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {key: value if key in ("type", "text") else _short(value) for key, value in part.items()}


def cell(row: Row, column: str, kind: type[Value]) -> Value:
    """The value in `column`. Raises BadRow where there is none, or an empty one, or one of another type."""
    value = row.get(column)
    if value is None:
        raise BadRow(f"column `{column}` is missing; the row has {', '.join(row) or 'nothing'}")
    if not isinstance(value, kind):
        raise BadRow(f"column `{column}` has the wrong type: {type(value).__name__}, not {kind.__name__}")
    if not isinstance(value, bool) and not (value.strip() if isinstance(value, str) else value):
        raise BadRow(f"column `{column}` is empty")
    return value


def ground_truth_of(row: Row) -> Any:
    """`reward_model.ground_truth`, else the column `ground_truth`, else `answer`, else None. Raises BadRow."""
    reward_model = cell(row, "reward_model", dict) if row.get("reward_model") else {}
    values = (reward_model.get("ground_truth"), row.get("ground_truth"), row.get("answer"))
    return next((value for value in values if value is not None), None)
