"""Files that are whole or absent: written aside, flushed to the disk, moved into place. And the user's own code."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import UserError


def load_named(reference: str, what: str) -> Any:
    """The object that `path/to/file.py:name` or `package.module:name` names, None where the module has none of it.

    Raises UserError where the module cannot be imported; `what` it is for begins the message.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise UserError(f"{what} {reference!r}: there is no file {place}")
    try:
        return getattr(_import(place), name, None)
    except UserError:
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        text = traceback.format_exc()
        raise UserError(f"{what} {reference!r}: importing {place} failed:\n{text}") from error


@cache
def _import(place: str) -> ModuleType:
    """A module, or a file under a name made of its path; imported once."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    loader = SourceFileLoader(f"tandem_user_{path}".replace(".", "_"), str(path))
    module = sys.modules[loader.name] = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module


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
