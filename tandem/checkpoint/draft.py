"""A checkpoint whose state has been copied, and whose files are being written while training goes on.

    rank         thread: its files, flushed  -->  .sealed_<rank>.json beside them, last: size and SHA-256 of each
    controller   thread: `writes`, then waits for the ranks' seals  -->  what the manifest says of each file

A rank's seals are there when its files are whole. What goes wrong on a rank, the controller asks for (`checks`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from tandem.errors import TandemError
from tandem.files import sync, write_text

T = TypeVar("T")
_THREADS = 4
_POLL_S = 0.01
"""Between two looks for the ranks' seals."""
Seals = dict[str, dict[str, Any]]
"""Size and SHA-256 of files, by their path within the checkpoint."""


class Abandoned(TandemError):
    """The write was given up before it was complete."""


@dataclass(slots=True)
class Draft:
    """What is there of a checkpoint, and what is still to come."""

    directory: Path
    """Has the controller's records when the pause for the copy is over; ranks and `writes` fill in the rest."""
    seals: list[Path] = field(default_factory=list[Path])
    """One for each rank that writes files."""
    writes: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """What the controller still has to write: called in a thread, once each."""
    checks: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Each asks ranks whether they can go on writing, and raises what went wrong. For the controller's own thread."""
    abandoned: Event = field(default_factory=Event)
    """Set: `complete` raises."""
    whole: Event = field(default_factory=Event)
    """Set: it is a checkpoint on this disk; what goes on is a copy of it."""

    def check(self) -> None:
        for check in self.checks:
            check()

    def raise_if_abandoned(self) -> None:
        if self.abandoned.is_set():
            raise Abandoned(f"{self.directory}: given up")

    def complete(self) -> Seals:
        """Wait until all files are written and flushed; what the manifest says of them. Raises Abandoned."""
        for write in self.writes:
            write()
        while not all(path.exists() for path in self.seals):
            self.abandoned.wait(_POLL_S)
            self.raise_if_abandoned()
        found: Seals = {}
        for path in self.seals:
            of_a_rank: Seals = json.loads(path.read_text(encoding="utf-8"))
            folder = path.parent.relative_to(self.directory)
            found |= {str(folder / name): described for name, described in of_a_rank.items()}
            path.unlink()
        others = (path for path in self.directory.rglob("*") if path.is_file())
        own = [path for path in others if self._name(path) not in found]
        return found | _seal(self.directory, own, self.raise_if_abandoned)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.directory))


def seals_of_rank(directory: Path, rank: int) -> Path:
    """The file by which a rank says that all of its files in a model's directory are whole."""
    return directory / f".sealed_{rank:05d}.json"


def write_seals(path: Path, files: Iterable[Path]) -> None:
    """Flush files, which lie in or below the directory of `path`, then write there what is to be expected of them."""
    write_text(path, json.dumps(_seal(path.parent, list(files))))


def describe(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _seal(directory: Path, files: list[Path], check: Callable[[], None] = lambda: None) -> Seals:
    seals: Seals = {}

    def seal(file: Path) -> None:
        check()
        sync(file)
        seals[str(file.relative_to(directory))] = describe(file)

    for_each(seal, files)
    return seals


def for_each(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Call it with every item, in some threads; raises the first error once they have ended.

    They are daemons, which a process does not wait for when it ends, as it does for those of concurrent.futures.
    """
    left, lock, errors = list(items), Lock(), list[BaseException]()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    if not left:
                        return
                    item = left.pop()
                function(item)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller raises it
            errors.append(error)

    threads = [Thread(target=work, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
