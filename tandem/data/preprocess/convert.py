"""Files of rows -> parquet files of other rows, streaming: no more than a chunk of rows is in memory."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.data.rows import BadRow, Row, read_rows
from tandem.errors import UserError
from tandem.files import ROW_ENDINGS, replacing

CHUNK_ROWS = 1000
SPLITS = {"train": "train", "test": "test", "val": "val", "dev": "val"}
"""Beginning of a word in a file's name, or its folder's, to the split that it holds; without any: train."""


class Place(NamedTuple):
    """Where a row comes from."""

    split: str
    index: int
    """Position among the rows of its split."""
    folder: Path = Path()
    """That of its file, from which relative paths start."""


_OF_A_QUESTION = ("data_source", "prompt", "system", "ability", "ground_truth")
"""New columns that have a place of their own in a verl row; others are part of its `extra_info`."""
ToRows = Callable[[Row, Place], Iterator[tuple[str, Row]]]
"""What a row becomes: (name of an output file, row) for each; none to skip it. Raises BadRow."""


def convert(to_rows: ToRows, source: Path, out: Path, *, published: bool = True) -> dict[str, int]:
    """Write `<out>/<name>.parquet` for every name that `to_rows` gives; `source` is a data file or a folder of them.

    Returns the rows read, the rows of each file, and the rows skipped. The same source gives the same bytes. Raises
    UserError for a bad row, which asks of a `published` file if it is still that, and then no file is written.
    """
    counts, indices = Counter[str](), Counter[str]()
    with ExitStack() as files:
        writers: dict[str, Callable[[Row], None]] = {}
        for path, split in _splits(source, out):
            for number, row in read_rows(path):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    made = list(to_rows(row, Place(split, indices[split], path.parent)))
                except BadRow as bad:
                    question = "; is this the file as published?" if published else ""
                    raise UserError(f"{path}, row {number}: {bad}{question}") from bad
                indices[split] += 1
                counts.update(name for name, _ in made)
                counts["skipped"] += not made
                for name, converted in made:
                    if name not in writers:
                        writers[name] = files.enter_context(writing(out / f"{name}.parquet"))
                    writers[name](converted)
    return {"rows read": indices.total(), "skipped": counts.pop("skipped"), **counts}


def verl_row(place: Place, data_source: str, ability: str, prompt: str, ground_truth: Any, extra: Row) -> Row:
    """The canonical row: `prompt` is the user's message; `extra` goes to `extra_info`, `answer` being a right one."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {**extra, "split": place.split, "index": place.index},
    }


def mapping(columns: Mapping[str, str]) -> ToRows:
    """Rows from columns of the user's own: each new column is an old one's name, or a template such as `{a} + {b} = ?`.

    With `data_source` (a text or a template) they become verl rows, `prompt` being the user's message, `system` the
    system's, and every old column and further new one part of `extra_info`; else they have just the new columns.
    """

    def to_rows(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
        texts = {name for name, value in columns.items() if "{" in value or name == "data_source"}
        try:
            new = {name: v.format_map(row) if name in texts else row[v] for name, v in columns.items()}
        except (KeyError, IndexError, ValueError) as error:
            raise BadRow(f"--map: no column {error}; the row has {', '.join(row)}") from error
        if "data_source" in new:
            truth, prompt = new.get("ground_truth"), new["prompt"]
            if isinstance(prompt, list):
                raise BadRow("--map: the prompt is messages, which stay as they are without data_source; leave it out")
            prompt = str(prompt)
            extra = {**row, **{name: value for name, value in new.items() if name not in _OF_A_QUESTION}}
            made = verl_row(place, new["data_source"], new.get("ability", ""), prompt, truth, extra)
            system = [{"role": "system", "content": new["system"]}] if "system" in new else []
            new = {**made, "prompt": system + made["prompt"]}
        yield place.split, new

    if not {"prompt", "messages", "chosen"} & columns.keys() or ("data_source" in columns and "prompt" not in columns):
        raise UserError("--map: name at least the prompt (or, without data_source, messages, or chosen): prompt=COLUMN")
    if "data_source" in columns and (taken := [name for name in ("split", "index") if name in columns]):
        raise UserError(f"--map: {taken[0]}: extra_info has the row's own {taken[0]} there; take another name")
    return to_rows


def _splits(source: Path, out: Path) -> Iterator[tuple[Path, str]]:
    """The data files in a folder and below, but for our own, or the one file; each with its split."""
    found = {path for path in source.rglob("*") if path.name.lower().endswith(ROW_ENDINGS)}
    copies = {path for path in found if path.suffix == ".gz" and path.with_suffix("") in found}
    paths = [path for path in sorted(found - copies) if not path.resolve().is_relative_to(out.resolve())]
    if not paths and not source.is_file():
        raise UserError(f"{source}: holds no data files ({', '.join(ROW_ENDINGS)}); give their folder, or one file")
    for path in paths or [source]:
        parts = (path.name, *reversed(path.relative_to(source).parts[:-1]))
        words = [word for part in parts for word in re.split(r"[-_.]", part.lower())]
        splits = [split for word in words for start, split in SPLITS.items() if word.startswith(start)]
        yield path, splits[0] if splits else "train"


@contextmanager
def writing(path: Path) -> Iterator[Callable[[Row], None]]:
    """A function that appends a row; the file is there when the context ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    writer: pq.ParquetWriter | None = None

    def flush() -> None:
        nonlocal writer
        try:
            table = pa.Table.from_pylist(rows, schema=writer.schema if writer else None)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UserError(f"{path}: a column does not hold one type: {error}; make its values alike") from error
        writer = writer or pq.ParquetWriter(temporary, table.schema)
        writer.write_table(table)
        rows.clear()

    def append(row: Row) -> None:
        rows.append(row)
        if len(rows) == CHUNK_ROWS:
            flush()

    with replacing(path) as temporary:
        try:
            yield append
            flush()
        finally:
            if writer:
                writer.close()
