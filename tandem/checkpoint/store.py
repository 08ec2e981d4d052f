"""Checkpoint directories that are complete or absent, whatever kills the process and whenever.

    <run>/checkpoints/step_000010/{model/, state/, manifest.json}
    <run>/checkpoints/latest, best                 text files that hold a name: step_000010
    <run>/checkpoints/.step_000010.tmp-<pid>       being written, or being deleted
    <run>/checkpoints/.step_000010.old-<pid>       being replaced by a new step 10

A write flushes every file, then renames: a directory under its final name is whole. Size and SHA-256 of each file are
in its manifest, so that later damage (a full disk, a partial copy) is found before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError
from tandem.files import remove_leftovers, sync, sync_tree, temporary_name, write_text

MANIFEST = "manifest.json"
_LOG = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run. Belongs to the process that writes the run: it deletes leftovers of killed writes."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.directory = run_dir / "checkpoints"
        self._keep_last = keep_last
        if self.directory.is_dir():
            self._recover()

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A temporary directory to fill; on a clean exit it becomes the checkpoint of `step` and the latest one.

        Older checkpoints beyond `keep_last` are deleted, except the best; so are those of later steps, which a run
        that went back to an earlier checkpoint has left behind. After an exception everything is as before.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self._path(step)
        temporary = temporary_name(final)
        temporary.mkdir()
        try:
            yield temporary
            write_text(temporary / MANIFEST, json.dumps(_manifest(step, temporary), indent=1))
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        self._move_in(temporary, final)
        write_text(self.directory / "latest", final.name + "\n")
        self._prune(step)

    def latest(self) -> Path | None:
        """The checkpoint to resume from: what `latest` names, or the newest complete one before it.

        None without any checkpoint. Damaged ones are passed over with a logged warning; raises UserError when no other
        is left.
        """
        named = self._named("latest")
        steps = self._steps()
        if not steps:
            return None
        problems: list[str] = []
        for step in sorted((s for s in steps if named is None or s <= named), reverse=True):
            damaged = damage(self._path(step))
            if not damaged:
                for problem in problems:
                    _LOG.warning("%s; resuming from %s instead", problem, self._path(step).name)
                return self._path(step)
            problems.append(f"{self._path(step)}: {damaged[0]}")
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"{self.directory}: no complete checkpoint; delete the directory to start anew\n{listed}")

    def verify(self, path: Path) -> None:
        """Compare every file with the manifest, content included; raises UserError that lists what differs."""
        if damaged := damage(path, content=True):
            listed = "\n".join(f"  - {problem}" for problem in damaged)
            raise UserError(f"{path}: the checkpoint is damaged; use another one\n{listed}")

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step` until another is marked."""
        assert self._path(step).is_dir(), f"no checkpoint of step {step}"
        write_text(self.directory / "best", self._path(step).name + "\n")
        self._prune(self._steps()[-1])

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(step for path in self.directory.iterdir() if (step := _step_of(path.name)) is not None)

    def _named(self, pointer: str) -> int | None:
        path = self.directory / pointer
        return _step_of(path.read_text().strip()) if path.exists() else None

    def _move_in(self, temporary: Path, final: Path) -> None:
        replaced = final.with_name(f".{final.name}.old-{os.getpid()}")
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        sync(self.directory)
        if replaced.exists():
            self._delete(replaced)

    def _prune(self, step: int) -> None:
        """Delete what `keep_last` does not cover, `step` being the newest."""
        steps = self._steps()
        kept = {*[s for s in steps if s <= step][-self._keep_last :], self._named("best")}
        for other in steps:
            if other not in kept:
                self._delete(self._path(other))

    def _delete(self, path: Path) -> None:
        """Hide, then delete: a deletion that is cut short must not look like a checkpoint."""
        trash = temporary_name(path)
        os.rename(path, trash)
        shutil.rmtree(trash)

    def _recover(self) -> None:
        """Finish or undo what a killed process was doing."""
        remove_leftovers(self.directory)
        for replaced in self.directory.glob(".step_*.old-*"):
            final = replaced.with_name(replaced.name[1:].partition(".")[0])
            if final.exists():
                self._delete(replaced)
            else:
                os.rename(replaced, final)


def damage(path: Path, content: bool = False) -> list[str]:
    """What differs between the files of a checkpoint and its manifest, sizes only or `content` too; empty: sound."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (ValueError, KeyError, TypeError):
        return [f"{MANIFEST} cannot be read"]
    found: list[str] = []
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, the manifest says {expected['bytes']}")
        elif content and _sha256(file) != expected["sha256"]:
            found.append(f"{name} has another content than was written")
    return found


def _manifest(step: int, directory: Path) -> dict[str, object]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    described = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    return {"step": step, "files": described}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_(\d{6,})", name)
    return int(match[1]) if match else None
