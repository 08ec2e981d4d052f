"""Data files whose rows are tokenised once, by several processes, and kept on disk by what they were made of.

    chunks of a file --processes--> batches of packed items --> <key>.arrow, then <key>.json: what is whole has it

The key is a digest of the file's content, the tokenizer with its chat template, the kind of data set, the keys of the
configuration that change its items, and what computes them: our own files of code, and the versions of packages. So
nothing has to be invalidated: what has changed has another key.

consumes:     chunks, read by this process
produces:     the two files, batches in the order of the chunks
waits for:    a process that is free; each has one chunk at a time
unblocked by: results, and the end of a process, which is a RuntimeError
"""

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from tandem.data.packed import Packed, checksum, pack
from tandem.data.rows import BadRow, Chunk, Pace, Row, content_digest, read_chunks
from tandem.errors import UserError
from tandem.files import replacing, temporary_name, write_text
from tandem.models.chat_template import day_shown
from tandem.stored import DamagedFile, read_json

_PACKAGES = ("transformers", "tokenizers", "jinja2")
"""Those that compute items of rows."""
CODE = (
    "data/cache.py", "data/chat.py", "data/columns.py", "data/dataset.py", "data/messages.py", "data/packed.py",
    "data/row_images.py", "data/preference.py", "data/rows.py", "data/sft.py", "jobs/openings.py",
    "models/end_of_sequence.py", "models/rendering.py", "models/shown_messages.py", "models/template_dialects.py",
    "models/template_process.py", "pictures/sources.py", "rollout/environments/tools.py",
    "rollout/formats/chat_template.py", "rollout/formats/control_tokens.py", "rollout/formats/stand_in.py",
    "rollout/formats/template.py",
)  # fmt: skip
"""Our own files that decide what is made of a row, and how a file holds it."""
_SHOWN = 10
"""Bad rows that are kept with their reasons."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.data.cache import main; main()"
"""The process finds modules where its parent does, and does not run the parent's `__main__` again."""


def code_digest(package: Path) -> str:
    """Of the files of `CODE` in the package's directory."""
    return hashlib.sha256(b"".join(hashlib.sha256((package / path).read_bytes()).digest() for path in CODE)).hexdigest()


_CODE_DIGEST = code_digest(Path(__file__).parents[1])
"""Of the code that this process runs: an edit while it runs does not change it."""


class NotPackable(Exception):
    """An item that is not the same after it was packed."""


class Reads(Protocol):
    """A data set, as far as it reads rows."""

    def pack_row(self, row: Row | BadRow, folder: Path) -> tuple[str, list["PackedItem"]]:
        """The format of a row, and its items. Raises BadRow and NotPackable."""
        ...


class PackedItem(NamedTuple):
    """An item, and what a Summary takes of it."""

    packed: Packed
    kind: str
    largest_id: int
    """Of its token ids."""


@dataclass(slots=True)
class Summary:
    """What a data set has to know of a file besides its items."""

    items: int = 0
    formats: dict[str, int] = field(default_factory=dict[str, int])
    """Rows of each format."""
    bad: int = 0
    first_bad: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Number and reason of the first bad rows."""
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Of each kind of items: the place of the first one, and how many there are."""
    sizes: list[int] = field(default_factory=list[int])
    """Items of each batch."""
    largest_id: tuple[int, int] = -1, 0
    """The largest token id of all items, and the number of the first row that has it."""

    def add_bad(self, number: int, reason: str) -> None:
        self.bad += 1
        if len(self.first_bad) < _SHOWN:
            self.first_bad.append((number, reason))

    def add_item(self, number: int, kind: str, largest_id: int) -> None:
        """`number`: of its row; `largest_id`: of its token ids."""
        first, count = self.kinds.get(kind, (self.items, 0))
        self.kinds[kind] = first, count + 1
        self.items += 1
        if largest_id > self.largest_id[0]:
            self.largest_id = largest_id, number

    def extend(self, other: "Summary") -> None:
        """With what comes after."""
        self.formats = dict(Counter(self.formats) + Counter(other.formats))
        self.bad += other.bad
        self.first_bad = [*self.first_bad, *other.first_bad][:_SHOWN]
        for kind, (first, count) in other.kinds.items():
            ours, before = self.kinds.get(kind, (self.items + first, 0))
            self.kinds[kind] = ours, before + count
        self.items += other.items
        self.sizes += other.sizes
        if other.largest_id[0] > self.largest_id[0]:
            self.largest_id = other.largest_id


class Part(NamedTuple):
    """What was made of one chunk."""

    batch: pa.RecordBatch | None
    """None: there was no usable row."""
    crc32: bytes
    summary: Summary


def make_part(reader: Reads, chunk: Chunk) -> Part:
    """Raises NotPackable."""
    summary, packed = Summary(), list[Packed]()
    for number, row in chunk.rows():
        try:
            row_format, items = reader.pack_row(row, chunk.path.parent)
        except BadRow as error:
            summary.add_bad(number, str(error))
            continue
        summary.formats[row_format] = summary.formats.get(row_format, 0) + 1
        for item, kind, largest_id in items:
            packed.append(item)
            summary.add_item(number, kind, largest_id)
    if not packed:
        return Part(None, b"", summary)
    summary.sizes = [len(packed)]
    batch = pack(packed)
    return Part(batch, checksum(batch), summary)


class RowCache:
    """A directory of such files. Those that are not used any more may be deleted at any time."""

    def __init__(self, directory: Path, workers: int | None) -> None:
        """`workers`: processes that tokenise; None: as many as CPUs that this one may use."""
        self._directory = directory.expanduser()
        self._workers = workers or len(os.sched_getaffinity(0))

    def find_or_make(self, path: Path, digest: str, reader: Reads, made_of: str) -> tuple[Path, Summary] | None:
        """The Arrow file of a data file's items, made where it is not there; None where they cannot be packed, or no
        file can be written. `digest`: that of the file's content; `made_of` says what items depend on besides. Raises
        UserError where the data file cannot be read, or changes while it is."""
        key = hashlib.sha256(json.dumps([_CODE_DIGEST, digest, path.suffix, made_of]).encode()).hexdigest()[:32]
        arrow, described = self._directory / f"{key}.arrow", self._directory / f"{key}.json"
        try:
            if (summary := _read_summary(described, arrow)) is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                with _alone(self._directory / f"{key}.lock", path.name):
                    if (summary := _read_summary(described, arrow)) is None:
                        _remove_abandoned(self._directory)
                        summary = self._make(path, reader, arrow)
                        if content_digest(path) != digest:
                            raise UserError(f"{path}: it has changed while it was read; start again when it is whole")
                        write_text(described, json.dumps(asdict(summary)))
        except NotPackable as error:
            print(f"{path.name}: {error}; its rows are tokenised at each start and kept in memory", flush=True)
            return None
        except OSError as error:
            print(f"data.cache.directory: {error}; rows are tokenised at each start and kept in memory", flush=True)
            return None
        return arrow, summary

    def _make(self, path: Path, reader: Reads, arrow: Path) -> Summary:
        whole = Summary()
        pace = Pace()
        with replacing(arrow) as temporary, ExitStack() as stack:
            writer: Any = None
            parts = stack.enter_context(closing(self._parts(path, reader)))
            for part in parts:
                whole.extend(part.summary)
                if part.batch is not None:
                    if writer is None:
                        writer = stack.enter_context(pa.ipc.new_file(str(temporary), part.batch.schema))
                    writer.write_batch(part.batch, {"crc32": part.crc32.decode()})
                if pace.is_due():
                    rate = whole.items / pace.seconds
                    print(f"{path.name}: {whole.items:,} rows tokenised, {rate:,.0f} a second", flush=True)
            if writer is None:
                stack.enter_context(pa.ipc.new_file(str(temporary), pa.schema([])))
        return whole

    def _parts(self, path: Path, reader: Reads) -> Generator[Part]:
        chunks = read_chunks(path)
        if self._workers == 1:
            yield from (make_part(reader, chunk) for chunk in chunks)
        else:
            with ExitStack() as stack:
                workers = [stack.enter_context(closing(_Worker(reader))) for _ in range(self._workers)]
                yield from _in_order(workers, chunks)


def _read_summary(described: Path, arrow: Path) -> Summary | None:
    """None where there is none that can be read, or no file that it is of: both are made anew."""
    try:
        summary = read_json(described, Summary)
    except DamagedFile:
        return None
    is_whole = summary.items == sum(summary.sizes) and (summary.formats or summary.bad)
    return summary if is_whole and arrow.is_file() else None


@contextmanager
def _alone(path: Path, data_file: str) -> Iterator[None]:
    """Wait until no other run makes the same."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{data_file}: another run is tokenising its rows; waiting for them", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned(directory: Path) -> None:
    """Delete what killed processes have left of files. One that makes a file holds the lock of its key meanwhile."""
    for temporary in directory.glob(temporary_name(Path("*.arrow")).name):
        key = temporary.name.removeprefix(".").partition(".")[0]
        with suppress(OSError), (directory / f"{key}.lock").open("a") as lock:  # it is made, or may not be touched
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink(missing_ok=True)


def tokenizer_of(tokenizer: Any) -> str | None:
    """All that a tokenizer makes of texts and messages depends on, as text; None where nobody can tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return None
    template = str(tokenizer.chat_template)
    today = day_shown(tokenizer)
    options = {
        name: str(value)
        for name, value in tokenizer.init_kwargs.items()
        if name != "name_or_path" and not name.endswith("_file")
    }
    versions = [version(package) for package in _PACKAGES]
    return json.dumps([type(tokenizer).__name__, backend.to_str(), template, today, options, versions], sort_keys=True)


class _Worker:
    """One process that makes parts of chunks."""

    def __init__(self, reader: Reads) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.process = subprocess.Popen(
            [sys.executable, "-uP", "-c", _START, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        theirs.close()
        self.send(reader)

    def send(self, what: Reads | Chunk) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells
            self.connection.send(what)

    def receive(self) -> Part:
        """Raises what making it has raised, RuntimeError where the process has ended."""
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"a process that tokenises has ended: exit status {self.process.wait()}") from None
        if isinstance(received, Exception):
            raise received
        return received

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def _in_order(workers: list[_Worker], chunks: Iterable[Chunk]) -> Iterator[Part]:
    """The parts of chunks. At most as many chunks as there are workers, and as many parts, are in memory at once."""
    free, busy = list(workers), dict[Any, tuple[int, _Worker]]()
    made: dict[int, Part] = {}
    following = 0
    for number, chunk in enumerate(chunks):
        while not free or number - following >= 2 * len(workers):
            _receive(busy, free, made)
            while following in made:
                yield made.pop(following)
                following += 1
        worker = free.pop()
        worker.send(chunk)
        busy[worker.connection] = number, worker
    while busy:
        _receive(busy, free, made)
    yield from (made[number] for number in sorted(made))


def _receive(busy: dict[Any, tuple[int, _Worker]], free: list[_Worker], made: dict[int, Part]) -> None:
    """Wait for parts, and take them in."""
    for connection in wait(list(busy)):
        number, worker = busy.pop(connection)
        made[number] = worker.receive()
        free.append(worker)


def main() -> None:
    """The process: a reader, then chunks, until the other side ends."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with closing(connection):
        try:
            reader = connection.recv()
            while True:
                connection.send(_tried(reader, connection.recv()))
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return


def _tried(reader: Reads, chunk: Chunk) -> Part | Exception:
    try:
        return make_part(reader, chunk)
    except (NotPackable, UserError) as error:
        return error
