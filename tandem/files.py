"""Files that are whole or absent: written aside, flushed to the disk, moved into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_bytes(path: Path, data: bytes) -> None:
    """Make `path` hold `data`; a reader, or a crash, sees the old content or the new one, never a mixture."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def temporary_name(path: Path) -> Path:
    """Where `path` is prepared: hidden, in the same directory, this process's own."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def remove_leftovers(directory: Path) -> None:
    """Delete what killed writers left in `directory`. Only for the one process that writes there."""
    for leftover in directory.glob(".*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` of everything below `directory`, and of itself."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)
