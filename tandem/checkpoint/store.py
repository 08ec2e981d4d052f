"""Checkpoint directories that are complete or absent, whatever kills the process and whenever.

    <run>/checkpoints/step_000010/{model/, state/, manifest.json}
    <run>/checkpoints/latest, best                 text files that hold a name: step_000010
    <run>/checkpoints/.*.tmp                       being written, or being deleted

A write flushes every file, then renames: a directory under its final name is whole. Size and SHA-256 of each file are
in its manifest, so that later damage (a full disk, a partial copy) is found before it is loaded.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError
from tandem.files import sync, sync_tree, temporary_name, write_text

MANIFEST = "manifest.json"
_LOG = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run. Belongs to the process that writes the run: it deletes leftovers of killed writes."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.directory = run_dir / "checkpoints"
        self._keep_last = keep_last
        for leftover in self.directory.glob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A temporary directory to fill; on a clean exit it becomes the checkpoint of `step` and the latest one.

        Older checkpoints beyond `keep_last` are deleted, except the best; so are those of later steps, which a run
        that went back to an earlier checkpoint has left behind. After an exception everything is as before.
        """
        final = self._path(step)
        temporary = temporary_name(final)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            files = {
                str(file.relative_to(temporary)): _describe(file) for file in temporary.rglob("*") if file.is_file()
            }
            write_text(temporary / MANIFEST, json.dumps({"step": step, "files": files}, indent=1))
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        if final.exists():  # damaged, or left behind: a run resumes from a checkpoint before the one that it writes
            self._delete(final)
        os.rename(temporary, final)
        sync(self.directory)
        write_text(self.directory / "latest", final.name + "\n")
        self._prune()

    def latest(self) -> Path | None:
        """The checkpoint to resume from: what `latest` names, or the newest undamaged one before it.

        None without any checkpoint; damaged ones are passed over and said, UserError is raised when no other is left.
        """
        for checkpoint in reversed(self._past()):
            problem = damage(checkpoint)
            if problem is None:
                return checkpoint
            _LOG.warning("%s is damaged and passed over: %s", checkpoint, problem)
        if self._all():
            raise UserError(f"{self.directory}: no complete checkpoint; delete the directory to start anew")
        return None

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step` until another is marked."""
        assert self._path(step).is_dir(), f"no checkpoint of step {step}"
        write_text(self.directory / "best", self._path(step).name + "\n")
        self._prune()

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _all(self) -> list[Path]:
        return sorted((path for path in self.directory.glob("step_*") if path.name[5:].isdigit()), key=_step)

    def _past(self) -> list[Path]:
        """Up to what `latest` names, ascending."""
        latest = self._named("latest")
        return [path for path in self._all() if latest is None or _step(path) <= _step(latest)]

    def _named(self, pointer: str) -> Path | None:
        path = self.directory / pointer
        return self.directory / path.read_text().strip() if path.exists() else None

    def _prune(self) -> None:
        kept = {*self._past()[-self._keep_last :], self._named("best")}
        for path in set(self._all()) - kept:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        """Hide, then delete: a deletion that is cut short must not look like a checkpoint."""
        trash = temporary_name(path.with_suffix(".deleted"))
        os.rename(path, trash)
        shutil.rmtree(trash)


def damage(checkpoint: Path) -> str | None:
    """What differs between the files of a checkpoint and its manifest, content included; None: sound."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        changed = [name for name, expected in files.items() if _describe(checkpoint / name) != expected]
    except (OSError, ValueError, KeyError) as error:
        return str(error)
    return f"not what was written: {', '.join(changed)}" if changed else None


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))
