"""Files that are whole or absent: written aside, flushed to the disk, moved into place. And the user's own code."""

import errno
import importlib
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from tandem.errors import TandemError, UserError
from tandem.exits import no_exit

ROW_ENDINGS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
"""Of data files."""
_TOLD_S = 10.0
"""Seconds of an import until a line says so, and between two of them."""


def load_named(reference: str, what: str, limit_s: float = math.inf) -> Any:
    """The object that `path/to/file.py:name` or `package.module:name` names, None where the module has none of it; or
    that `file.pkl:name` holds, as a program has written it (`config/objects.py`).

    Raises UserError where the module cannot be imported, or takes longer than `limit_s`; `what` it is for begins the
    message.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"{what} {reference!r}: write path/to/file.py:name or package.module:name")
    if place.endswith((".py", ".pkl")) and not Path(place).expanduser().is_file():
        raise UserError(f"{what} {reference!r}: there is no file {place}")
    try:
        with no_exit(), _within(limit_s, f"{what} {reference!r}: importing {place}"):
            return _read_pickle(place) if place.endswith(".pkl") else getattr(_import(place), name, None)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        raise UserError(f"{what} {reference!r}: importing {place} failed:\n{users_traceback(error)}") from error


@contextmanager
def _within(limit_s: float, what: str) -> Iterator[None]:
    """Around code of the user's that a command waits for: lines say that it does, and TimeoutError comes out of that
    code at the limit. Only a main thread has an alarm."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()

    def tell(*_: object) -> None:
        passed = time.monotonic() - start
        if passed >= limit_s:
            raise TimeoutError(f"it has taken {passed:.0f} s; see what the file waits for when it is imported")
        print(f"{what} has taken {passed:.0f} s so far", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGALRM, tell)
    each = min(_TOLD_S, limit_s)
    signal.setitimer(signal.ITIMER_REAL, each, each)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read_pickle(place: str) -> Any:
    return pickle.loads(Path(place).read_bytes())


def load_class(reference: str, key: str, what: str, methods: Sequence[str]) -> type[Any]:
    """The user's class that `reference` names, as `load_named` takes it. Raises UserError where it is none, or lacks
    one of the methods; `what` the class is, with an article, and the `key` that names it are in the message."""
    kind = load_named(reference, f"{key}:")
    if not isinstance(kind, type):
        raise UserError(f"{key}: {reference} names no class; give path/to/file.py:Class")
    if lacking := [name for name in methods if not callable(getattr(kind, name, None))]:
        raise UserError(
            f"{key}: {reference} lacks {', '.join(lacking)}; {what} has {', '.join(methods)} (docs/data.md)"
        )
    return kind


def users_traceback(error: BaseException, caller: str = __file__) -> str:
    """The traceback of what the user's code raised, without the frames that led there.

    Those are the first ones, of the file `caller`, of importlib and of asyncio. Where the error comes from before the
    user's code runs, as with a syntax error in it, no frames are left.
    """
    library = os.path.dirname(os.__file__)
    before = (caller, "<frozen ", f"{library}/importlib/", f"{library}/asyncio/")
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(before):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


class _UserFiles(MetaPathFinder):
    """Finds a user's file by the name of its module."""

    prefix = "tandem_user:"

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        return spec_from_file_location(fullname, unquote(fullname.removeprefix(self.prefix)))


def find_user_files() -> None:
    """Let this process unpickle what users' files define."""
    if not any(isinstance(finder, _UserFiles) for finder in sys.meta_path):
        sys.meta_path.append(_UserFiles())


def _import(place: str) -> ModuleType:
    """A module, or a file under a name made of its path; imported once."""
    if place.endswith(".py"):
        find_user_files()
        path = quote(str(Path(place).expanduser().resolve()))
        place = _UserFiles.prefix + path.replace(".", "%2E")  # a dot would name a module in a package
    return importlib.import_module(place)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file of a run. Raises TandemError that names it where the disk is full, a limit is
    reached, the directory is gone, or the like."""
    try:
        yield
    except OSError as error:
        raise TandemError(f"{path}: cannot be written ({error.strerror or error}); {mend_of(error)}") from error


def mend_of(error: OSError) -> str:
    """What a user can do about what cannot be written."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "make room there, then continue the run with --resume"
        case errno.EFBIG:
            return "raise the limit on the size of files (ulimit -f), then continue the run with --resume"
        case errno.ENOENT:
            return "its directory is gone: put it back and continue the run with --resume, or start anew"
        case _:
            return "mend that, then continue the run with --resume"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write a file to; on a clean exit it becomes `path`, else it is removed."""
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Make `path` hold `text` as UTF-8; a reader, or a crash, sees the old content or the new one, never a mixture."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def temporary_name(path: Path) -> Path:
    """Hidden, beside `path`; what a killed writer leaves there is replaced by the next write of `path`."""
    return path.with_name(f".{path.name}.tmp")


def make_room_for(outputs: Mapping[str, Path | None]) -> None:
    """Make the directories of the files that options name. Raises UserError where no file can be written there."""
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{option} {path}: {error}; give another file") from None
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UserError(f"{option} {path}: no file can be written there; give another one")


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)
