"""An index: passages, and a ranker of them, in a directory that is read without running any code of it.

INDEX/index.json           what it is
INDEX/passages.arrow       id, title, text; read from the disk as they are found
INDEX/ranker/              of search/words.py or search/vectors.py
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tandem.errors import UserError
from tandem.files import sync_tree, temporary_name
from tandem.search.vectors import Embedding, VectorRanker
from tandem.stored import DamagedFile, read_json
from tandem.types import FloatArray

_ABOUT, _PASSAGES, _RANKER = "index.json", "passages.arrow", "ranker"
_FORMAT = 1
_CHUNK = 1000
_SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])
_OF_DAMAGE = (
    OSError, ValueError, TypeError, AttributeError, LookupError, EOFError, RecursionError, pa.ArrowException,
)  # fmt: skip
"""What is raised by those who read the files of a ranker, in packages of which one is not ours."""
MOST_CHARACTERS = 10_000
"""Of a query; a longer one is cut: no question needs them, and each word costs time."""


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str

    @property
    def whole(self) -> str:
        """Title and text: what is searched, and what is shown."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float


class Ranker(Protocol):
    def scores(self, query: str) -> FloatArray:
        """`[passages]`: how well each fits. Takes any text, from any thread."""
        ...


class Index:
    """The passages that fit a query best."""

    def __init__(self, passages: pa.Table, ranker: Ranker) -> None:
        self._columns = [passages.column(name) for name in _SCHEMA.names]
        self._ranker = ranker

    def __len__(self) -> int:
        return len(self._columns[0])

    def search(self, query: str, k: int) -> list[Hit]:
        """At most `k`, the best first, and the earlier of two that are as good; those that score 0 or less are none."""
        scores = self._ranker.scores(query[:MOST_CHARACTERS])
        k = min(k, len(scores))
        if k < 1:
            return []
        least = np.partition(scores, -k)[-k]
        best = np.flatnonzero((scores >= least) & (scores > 0))
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [Hit(self._passage(int(row)), float(scores[row])) for row in best]

    def _passage(self, row: int) -> Passage:
        return Passage(*(column[row].as_py() for column in self._columns))


def shown(hits: Iterable[Hit]) -> str:
    """What a policy reads."""
    return "\n\n".join(f"[{hit.passage.id}] {hit.passage.whole}" for hit in hits) or "Nothing found."


def build_index(passages: Iterable[Passage], directory: Path, embedding: Embedding | None = None) -> int:
    """Write an index by words, or by vectors of an `embedding`. Returns how many passages it has.

    The directory is there when it is whole. Raises UserError where it is there already, or cannot be made.
    """
    if directory.exists():
        raise UserError(f"{directory}: is there already; remove it, or give another directory for the index")
    making = temporary_name(directory)
    try:
        shutil.rmtree(making, ignore_errors=True)
        (making / _RANKER).mkdir(parents=True)
        count = _write_passages(passages, making / _PASSAGES)
        texts = (passage.whole for passage in _read_passages(making / _PASSAGES))
        if embedding is None:
            _word_ranker().build(texts, making / _RANKER)
        else:
            VectorRanker.build(texts, making / _RANKER, embedding)
        about = {"format": _FORMAT, "ranker": "words" if embedding is None else "vectors", "passages": count}
        (making / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        sync_tree(making)
        os.replace(making, directory)
    except OSError as error:
        raise UserError(f"{directory}: no index can be written there: {error}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return count


def open_index(directory: Path) -> Index:
    """Raises UserError where there is none, or it is damaged."""
    if not (directory / _ABOUT).is_file():
        raise UserError(f"{directory}: is no index; make one with tandem search index CORPUS {directory}")
    try:
        about = read_json(directory / _ABOUT, dict[str, Any])
    except DamagedFile as error:
        raise UserError(f"{directory}: the index is damaged ({_ABOUT}: {error.reason}); make it anew") from None
    if about.get("format") != _FORMAT:
        raise UserError(f"{directory}: is an index of another version of Tandem; make it anew")
    kind: type[Ranker] = VectorRanker if about.get("ranker") == "vectors" else _word_ranker()
    try:
        ranker = kind.load(directory / _RANKER)  # type: ignore[attr-defined]
        table = pa.ipc.open_file(pa.memory_map(str(directory / _PASSAGES))).read_all()
        if table.schema != _SCHEMA:
            raise ValueError(f"{_PASSAGES} has other columns than passages")
        index = Index(table, ranker)
    except _OF_DAMAGE as error:
        raise UserError(f"{directory}: the index is damaged ({error}); make it anew") from None
    if len(index) != about.get("passages"):
        raise UserError(
            f"{directory}: the index is damaged ({len(index)} passages of {about.get('passages')}); make it anew"
        )
    return index


def _word_ranker():
    try:
        from tandem.search.words import WordRanker
    except ModuleNotFoundError as error:
        raise UserError(
            f"search by words needs {error.name}: pip install -e '.[search]' in a clone of Tandem"
        ) from None
    return WordRanker


def _write_passages(passages: Iterable[Passage], path: Path) -> int:
    count, rest = 0, iter(passages)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        while chunk := list(islice(rest, _CHUNK)):
            columns = [[getattr(passage, name) for passage in chunk] for name in _SCHEMA.names]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
            count += len(chunk)
    return count


def _read_passages(path: Path) -> Iterator[Passage]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(reader.num_record_batches):
        for row in reader.get_batch(number).to_pylist():
            yield Passage(**row)
