"""Data files -> numbered rows -> checked cells."""

import gzip
import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
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
ROW_MIB = 128
"""The most that a row may have: several times as much is in memory while it is read."""
_CHUNK_BYTES = 2**24
"""A chunk takes no further row after so many."""
_WHOLE_MIB = 1024
"""The most of a file that is read as one value."""
_MIB = 2**20
_FIRST_LINE_S, _LINE_S = 2.0, 10.0
"""Until the first line of progress, and between two."""
_SHORT = 4096
"""Texts below this length stay where pictures go: paths, and keys of stored ones."""
Value = TypeVar("Value")
_IN_WORDS: dict[type, str] = {
    str: "text", list: "a list", dict: "an object {…}", bool: "true or false", int: "a number", float: "a number",
    bytes: "bytes", type(None): "null",
}  # fmt: skip


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
    """Lines of JSON, entries of a list of JSON, or a batch; BadRow in the place of a line that is too long."""

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """Numbers and rows, without empty lines. Raises UserError where a batch holds what is no value of its type."""
        try:
            listed: list[Any] = self.content if isinstance(self.content, list) else _rows_of(self.content)
        except (ValueError, pa.ArrowException) as error:
            raise unreadable(self.path, self.first - 1, error) from error
        for number, row in enumerate(listed, start=self.first):
            if isinstance(row, BadRow):
                yield number, row
            elif not isinstance(self.content, list):
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
        most = 16 if pictured else ROWS_PER_CHUNK
        yield from file.iter_batches(batch_size=min([most, *map(_rows_at_once, _groups(file))]))


def _groups(file: pq.ParquetFile) -> Iterator[pq.RowGroupMetaData]:
    return (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))


def _rows_at_once(group: pq.RowGroupMetaData) -> int:
    """So many rows of a group are read together that they take no more than a chunk should, on average."""
    return max(1, _CHUNK_BYTES * group.num_rows // max(1, group.total_byte_size))


def _rows_of(batch: pa.RecordBatch) -> list[Row | BadRow]:
    """The rows of a batch, of which those that are too long are not made."""
    if batch.nbytes <= ROW_MIB * _MIB:
        return batch.to_pylist()
    each = (batch.slice(place, 1) for place in range(batch.num_rows))
    return [_too_long(one.nbytes) if one.nbytes > ROW_MIB * _MIB else one.to_pylist()[0] for one in each]


def _may_hold_pictures(field: "pa.Field[Any]") -> bool:
    """A column of pictures, or of messages with parts that hold some."""
    return field.name in _PICTURED or any(word in str(field.type) for word in ("binary", "image", "video"))


def _read_json_lines(path: Path) -> Iterator[list[Any]]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as lines:
        first = lines.readline(ROW_MIB * _MIB + 1).removeprefix(_MARK)
        while _is_json(path) and first and not first.strip():
            first = lines.readline(ROW_MIB * _MIB + 1)
        if _is_json(path) and (first.strip() == b"{" or first.lstrip().startswith(b"[")):  # one object, or a list
            rest = lines.read(_WHOLE_MIB * _MIB + 1)
            if len(rest) > _WHOLE_MIB * _MIB:
                mend = "which would have to be in memory at once; write an object a line (.jsonl)"
                raise UserError(f"{path}: it is one JSON value of more than {_WHOLE_MIB:,} MiB, {mend}")
            value = parse_json(first + rest)
            whole: list[Any] = value if isinstance(value, list) else [value]
            yield from (whole[at : at + ROWS_PER_CHUNK] for at in range(0, len(whole), ROWS_PER_CHUNK))
            return
        yield from _chunked(_lines(lines, first))


def _lines(file: BufferedIOBase, line: bytes) -> Iterator[bytes | BadRow]:
    """The lines of a file from its first one on. Of one that is too long no more is in memory than a row may have."""
    while line:
        length = len(line)
        while length > ROW_MIB * _MIB and not line.endswith(b"\n") and (line := file.readline(_CHUNK_BYTES)):
            length += len(line)
        yield line if length <= ROW_MIB * _MIB else _too_long(length)
        line = file.readline(ROW_MIB * _MIB + 1)


def _chunked(lines: Iterable[bytes | BadRow]) -> Iterator[list[bytes | BadRow]]:
    chunk, length = list[bytes | BadRow](), 0
    for line in lines:
        chunk.append(line)
        length += len(line) if isinstance(line, bytes) else 0
        if len(chunk) == ROWS_PER_CHUNK or length >= _CHUNK_BYTES:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk


def _too_long(count: int) -> BadRow:
    mend = "keep pictures, videos and long texts in files of their own, or split the row"
    return BadRow(f"it has {count / _MIB:,.0f} MiB; a row may have {ROW_MIB}: {mend}")


def _is_json(path: Path) -> bool:
    return path.name.lower().endswith((".json", ".json.gz"))


def _parse_line(line: bytes) -> Row | BadRow:
    try:
        value = parse_json(line)
    except UnicodeDecodeError as error:
        there = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        return BadRow(f"the line is no text in UTF-8 ({there}); save the file as UTF-8")
    except ValueError as error:
        return BadRow(f"the line is not valid JSON: {error}")
    return _object(value, "the line")


def _object(value: Any, what: str) -> Row | BadRow:
    try:
        encoded = json.dumps(
            value, ensure_ascii=False
        ).encode()  # fails on half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        return BadRow(f"{what} is not valid JSON: {error}")
    if len(encoded) > ROW_MIB * _MIB:
        return _too_long(len(encoded))
    return value if isinstance(value, dict) else BadRow(f"{what} holds {in_words(type(value))}, not an object {{…}}")


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


def lacking(row: Row, column: str) -> str:
    """In words, that a row has nothing in `column`, and where it has something."""
    has = ", ".join(name for name, value in row.items() if value is not None)
    return f"column `{column}` is {'null' if column in row else 'missing'}; the row has {has or 'nothing'}"


def in_words(kind: type) -> str:
    """What JSON calls a value of this type."""
    return _IN_WORDS.get(kind, f"a {kind.__name__}")


def cell(row: Row, column: str, kind: type[Value], *, blank: bool = False) -> Value:
    """The value in `column`. Raises BadRow where there is none, or an empty one, or one of another type. `blank`: text
    of whitespace alone may stand there."""
    value = row.get(column)
    if value is None:
        raise BadRow(lacking(row, column))
    if not isinstance(value, kind):
        raise BadRow(f"column `{column}` has the wrong type: {in_words(type(value))}, not {_wanted(column, kind)}")
    if not isinstance(value, bool) and not value:
        raise BadRow(f"column `{column}` is empty")
    if isinstance(value, str) and not value.strip() and not blank:
        raise BadRow(f"column `{column}` holds only whitespace: {value[:20]!r}")
    return value


def _wanted(column: str, kind: type) -> str:
    """In words; callers ask for a list of messages where a prompt is not text."""
    return "text or a list of messages" if column == "prompt" and kind is list else in_words(kind)


def ground_truth_of(row: Row) -> Any:
    """`reward_model.ground_truth`, else the column `ground_truth`, else `answer`, else None. Raises BadRow."""
    reward_model = cell(row, "reward_model", dict) if row.get("reward_model") else {}
    values = (reward_model.get("ground_truth"), row.get("ground_truth"), row.get("answer"))
    return next((value for value in values if value is not None), None)
