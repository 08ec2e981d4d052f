"""Files that are whole or absent: written aside, flushed to the disk, moved into place."""

import os
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
