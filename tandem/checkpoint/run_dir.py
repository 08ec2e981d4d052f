"""The run directory: one run a directory, and a resumed run is the same run."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.checkpoint.fork import fork_of
from tandem.config.load import dump_config, load_config
from tandem.config.objects import DIRECTORY as OBJECTS
from tandem.config.resume import Change, changes
from tandem.config.tree import SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.files import temporary_name, write_text, writing

_CONFIG, _LOCK = "config.yaml", ".lock"
_AS_STARTED = ".started.yaml"
"""The same as `_CONFIG`, which people edit: what the run really had at its last start."""
_PICTURES = "pictures"
"""Of rows, which are read before the run claims the directory."""
_BEFORE = (_PICTURES, OBJECTS)
"""What may be there before the run."""
_COMMAND = "trainer.resume"
"""A key that says what to do now; it is no setting of the run."""


@contextmanager
def open_run_dir(config: TrainConfig | SftConfig) -> Iterator[list[Change]]:
    """Make `trainer.run_dir` the directory of the run that `config` describes; meanwhile no other process can.

    Gives what differs from the settings that the run in it has had so far. Raises UserError as `check_run_dir` does,
    and when another process has the directory open.
    """
    path = config.trainer.run_dir
    check_run_dir(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"trainer.run_dir: {error}; give another one") from None
    with locked(path):
        changed = check_run_dir(config)
        for name in (_CONFIG, _AS_STARTED):
            with writing(path / name):
                write_text(path / name, dump_config(config))
        yield changed


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process is between here and the end of the block.

    The lock is the kernel's, also over NFS: it ends with the process, however that ends, so none is ever stale.
    """
    try:
        opened = (path / _LOCK).open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path / _LOCK}: cannot be opened ({error.strerror}); it is to be a file") from None
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"{path}: {file.read() or 'another process'} is running this run; wait until it has ended, or end it"
            ) from None
        except OSError as error:
            print(f"{path}: this file system has no locks ({error}); see that no other process writes this run")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check_run_dir(config: TrainConfig | SftConfig) -> list[Change]:
    """What `open_run_dir` would return; nothing is written.

    Raises UserError when there can be no such directory, when it holds something else, another run (unless that failed
    before its first step), or the same run with other values of keys that a resumed run must keep, and when
    `trainer.branch_from` is no checkpoint.
    """
    path, stored = config.trainer.run_dir, config.trainer.run_dir / _CONFIG
    nearest = next(place for place in (path, *path.parents) if place.exists())
    where = f"{path}:" if nearest == path else f"{path}: {nearest}"
    if not nearest.is_dir():
        raise UserError(f"{where} is a file; give another trainer.run_dir")
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{where} may not be written by this user; give another trainer.run_dir")
    started = path / _AS_STARTED
    ours = (temporary_name(stored).name, temporary_name(started).name, _AS_STARTED, _LOCK, *_BEFORE)
    found = sorted(entry.name for entry in path.iterdir() if entry.name not in ours) if path.exists() else []
    if found and not stored.exists():
        raise UserError(f"{path}: not a run (no {_CONFIG}, but {', '.join(found[:3])}); give another trainer.run_dir")
    if not (path / "checkpoints").exists() and not (path / "metrics.jsonl").exists():
        fork_of(config)
        return []
    if not config.trainer.resume:
        raise UserError(f"{path}: holds another run; continue it with --resume {path}, or give another trainer.run_dir")
    kind: Any = type(config)
    had = load_config(kind, started if started.exists() else stored)
    changed = [change for change in changes(had, config) if change.key != _COMMAND]
    if fixed := [change for change in changed if not change.allowed]:
        listed = "".join(f"\n  - {change}" for change in fixed)
        mend = "give another trainer.run_dir, for it has no checkpoint yet to start a new run from"
        if (path / "checkpoints" / "latest").exists():
            mend = (
                f"start a new run from its last checkpoint with trainer.branch_from={path} and another trainer.run_dir"
            )
        edited = {change.key for change in changes(had, load_config(kind, stored))}
        back = f"put the old values back into {stored}, which has been edited"
        if edited.isdisjoint(change.key for change in fixed):
            back = "give the old values, as --resume does without a configuration"
        raise UserError(
            f"{path}: cannot be resumed with other values of these keys, which decide what a run learns; {back}, or "
            f"{mend}{listed}"
        )
    return changed


def refuse_to_fetch_into(path: Path, kind: type[TrainConfig | SftConfig], described: str) -> None:
    """UserError where `path` holds something else than the run whose config.yaml reads `described`."""
    if not (path / _CONFIG).exists():
        if path.exists() and any(entry.name not in (_LOCK, *_BEFORE) for entry in path.iterdir()):
            raise UserError(f"{path}: not a run (no {_CONFIG}); give another trainer.run_dir")
        return
    with TemporaryDirectory() as folder:
        fetched = Path(folder) / _CONFIG
        write_text(fetched, described)
        found = changes(load_config(kind, fetched), load_config(kind, path / _CONFIG))
    other = [change for change in found if not change.allowed and change.key != _COMMAND]
    if other and (path / "checkpoints" / "latest").exists():
        raise UserError(f"{path}: holds another run than the one to fetch ({other[0]}); give another trainer.run_dir")
