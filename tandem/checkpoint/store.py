"""Checkpoint directories that are complete or absent, whatever kills the process and whenever.

    <run>/checkpoints/step_000010/{model/, state/, manifest.json}
    <run>/checkpoints/latest, best                 text files that hold a name: step_000010
    <run>/checkpoints/.*.tmp                       being written, or being deleted

A write flushes every file, then renames: a directory under its final name is whole. Size and SHA-256 of each file are
in its manifest, so that later damage (a full disk, a partial copy) is found before it is loaded. Both take a second a
GB or more, and deleting what is old may take long, too, so threads do it, while the controller goes on serving whoever
generates ahead of training.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from tandem.errors import TandemError, UserError
from tandem.files import sync, sync_tree, temporary_name, write_text

T = TypeVar("T")
_THREADS = 4
_TURN_S = 0.005
"""Between two looks at what the caller has to do meanwhile."""


class CheckpointStore:
    """The checkpoints of one run. Belongs to the process that writes the run: it deletes leftovers of killed writes."""

    def __init__(self, run_dir: Path, keep_last: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` is called again and again while files are flushed and deleted; it does not wait, and what it
        raises ends the write."""
        self.directory = run_dir / "checkpoints"
        self._keep_last = keep_last
        self._meanwhile = meanwhile
        for leftover in self.directory.glob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def write(self, step: int, best: bool = False) -> Iterator[Path]:
        """A temporary directory to fill; on a clean exit it becomes the checkpoint of `step` and the latest one.

        Older checkpoints beyond `keep_last` are deleted, except the best; so are those of later steps, which a run
        that went back to an earlier checkpoint has left behind. After an exception everything is as before, or, from
        when the old ones are being deleted, the checkpoint is there; TandemError where the disk is full.
        """
        final = self.directory / f"step_{step:06d}"
        temporary = temporary_name(final)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            written = [path for path in temporary.rglob("*") if path.is_file()]
            sealed = zip(written, self._seal(written), strict=True)
            files = {str(path.relative_to(temporary)): described for path, described in sealed}
            write_text(temporary / "manifest.json", json.dumps({"step": step, "files": files}, indent=1))
            run_beside(self._meanwhile, partial(sync_tree, temporary))
        except BaseException as error:
            shutil.rmtree(temporary)
            if os.strerror(errno.ENOSPC) in str(error):  # by whatever library, in whichever process
                raise TandemError(
                    f"{final}: no space left for this checkpoint; make room, then continue from the one before it with "
                    f"--resume {self.directory.parent}"
                ) from error
            raise
        if final.exists():  # of a run that went back, or was killed before it could call it the latest
            self._delete(final)
        os.rename(temporary, final)
        sync(self.directory)
        for pointer in ["best", "latest"] if best else ["latest"]:  # a run killed between the two repeats the step
            write_text(self.directory / pointer, final.name + "\n")
        self._prune(step)

    def _seal(self, files: Sequence[Path]) -> list[dict[str, object]]:
        """Flush files to the disk; what the manifest says of each."""
        return run_beside(self._meanwhile, *(partial(_seal, file) for file in files))

    def latest(self) -> Path | None:
        """The checkpoint to resume from, None before the first one; raises UserError when it is damaged."""
        checkpoint = self._named("latest")
        if checkpoint is not None:
            mend = f"write the name of an earlier one into {self.directory / 'latest'}, or delete that file"
            check_sound(checkpoint, f"{mend} to start anew")
        return checkpoint

    def _named(self, pointer: str) -> Path | None:
        path = self.directory / pointer
        return self.directory / path.read_text().strip() if path.exists() else None

    def _prune(self, step: int) -> None:
        found = {int(path.name[5:]): path for path in self.directory.glob("step_*") if path.name[5:].isdigit()}
        kept = sorted(number for number in found if number <= step)[-self._keep_last :]
        for number, path in found.items():
            if number not in kept and path != self._named("best"):
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Hide, then delete: a deletion that is cut short must not look like a checkpoint."""
        trash = temporary_name(path.with_suffix(".deleted"))
        os.rename(path, trash)
        run_beside(self._meanwhile, partial(shutil.rmtree, trash))


def run_beside(meanwhile: Callable[[], None], *calls: Callable[[], T]) -> list[T]:
    """What the calls return, each made in a thread; `meanwhile` is called again and again until all have ended.

    It does not wait. What it raises comes out of here when the calls under way have ended; others are not begun.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        under_way = [threads.submit(call) for call in calls]
        try:
            while wait(under_way, _TURN_S).not_done:
                meanwhile()
        finally:
            threads.shutdown(cancel_futures=True)
    return [one.result() for one in under_way]


def check_sound(checkpoint: Path, mend: str) -> None:
    """UserError, which ends with `mend`, when the checkpoint is damaged."""
    problem = damage(checkpoint)
    if problem:
        raise UserError(f"{checkpoint}: damaged ({problem}); {mend}")


def damage(checkpoint: Path) -> str | None:
    """What differs between the files of a checkpoint and its manifest, content included; None: sound."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        changed = [name for name, expected in files.items() if _describe(checkpoint / name) != expected]
    except (OSError, ValueError, KeyError) as error:
        return str(error)
    return f"not what was written: {', '.join(changed)}" if changed else None


def _seal(file: Path) -> dict[str, object]:
    sync(file)
    return _describe(file)


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}
