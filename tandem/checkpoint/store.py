"""Checkpoint directories that are complete or absent, whatever kills the process and whenever.

    <run>/checkpoints/step_000010/{model/, state/, manifest.json}, with critic/, adapter/ or reference/ where there are
    <run>/checkpoints/latest, best                 text files that hold a name: step_000010
    <run>/checkpoints/.*.tmp                       being written, or being deleted

    consumes       a Draft: state that has been copied, and files that are still to be written
    produces       a directory under its final name, flushed; size and SHA-256 of each file are in its manifest
    waits for      the files of the ranks, in a thread; the controller goes on with the next steps
    unblocked by   the seals of all ranks, or `abandon`

At most one checkpoint is being written. The next one, and the end of the run, wait for it in `finish`, and what went
wrong with it comes out of `check` or `finish`, never later than at the end of the step.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Protocol

from tandem.checkpoint.draft import Draft, describe
from tandem.errors import TandemError, UserError
from tandem.files import sync, sync_tree, temporary_name, write_text
from tandem.stored import parse_json, read_pointer, read_text

_POLL_S = 0.005
"""Between two looks at what the caller has to do meanwhile."""
_ASK_S = 0.2
"""While the write is waited for, between two questions to the ranks."""
_FIRST_LINE_S, _LINE_S = 1.0, 10.0
"""Until the first line of progress, and between two."""


_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What goes wrong with disks: whatever library says so, in whichever process, uses the system's words."""


class RemoteStore(Protocol):
    """Where checkpoints are copied to."""

    url: str

    def is_behind(self, checkpoint: Path) -> bool:
        """What is there is older than this checkpoint, or another one of its name."""
        ...

    def has_best(self, name: str) -> bool:
        """The best checkpoint there is the one of this name."""
        ...

    def push(self, checkpoint: Path, pointers: Mapping[str, str], keep_last: int, check: Callable[[], None]) -> None:
        """Copy a checkpoint and what points to which one, and keep others as `kept_names` says; `check` raises where it
        is to be given up."""
        ...


class _Write:
    """A checkpoint that a thread completes."""

    def __init__(self, step: int, draft: Draft, complete: Callable[[], None]) -> None:
        self.step, self.draft = step, draft
        self.error: BaseException | None = None
        self._complete = complete
        self.thread = Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._complete()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self.error = error


class CheckpointStore:
    """The checkpoints of one run. Belongs to the process that writes the run: it deletes leftovers of killed writes."""

    def __init__(
        self,
        run_dir: Path,
        keep_last: int,
        meanwhile: Callable[[], None] = lambda: None,
        remote: RemoteStore | None = None,
    ) -> None:
        """`meanwhile` is called again and again while a write is waited for; it does not wait. What it raises comes out
        of there. A checkpoint that is complete is copied to `remote` before the next one is begun."""
        self.directory = run_dir / "checkpoints"
        self._keep_last = keep_last
        self._meanwhile = meanwhile
        self._remote = remote
        self.completed: Path | None = None
        """The checkpoint that was completed last."""
        self._writing: _Write | None = None
        for leftover in self.directory.glob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def write(self, step: int, best_step: int | None = None) -> Iterator[Draft]:
        """The draft of a checkpoint, in a temporary directory, to fill; on a clean exit a thread begins to complete it.

        First it waits for the one before. When it is complete, it is the checkpoint of `step` and the latest one, and
        older ones beyond `keep_last` are deleted, except that of `best_step`, the best one; so are those of later
        steps, which a run that went back to an earlier checkpoint has left behind. After an exception everything is as
        before, or, from when the old ones are being deleted, the checkpoint is there. TandemError where the disk is
        full.
        """
        self.finish()
        final = self._final(step)
        temporary = temporary_name(final)
        draft = Draft(temporary)
        try:
            self.directory.mkdir(exist_ok=True)  # not that of the run, which somebody may have deleted
            temporary.mkdir()
            yield draft
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._told(error, step) from error
        self._writing = _Write(step, draft, lambda: self._complete(draft, step, best_step))

    def copy(self, checkpoint: Path) -> None:
        """Begin to copy to `remote` the checkpoint that a run goes on from, where a copy failed or was cut short."""
        remote = self._remote
        if remote is None:
            return
        draft = Draft(checkpoint)
        draft.whole.set()

        def complete() -> None:
            with self._told_of(remote, checkpoint):
                if remote.is_behind(checkpoint):
                    self._push(remote, checkpoint, draft)

        self._writing = _Write(step_of(checkpoint.name), draft, complete)

    def check(self) -> None:
        """Raises what went wrong with the write under way, or with one that has ended since."""
        writing = self._writing
        if writing is not None and writing.thread.is_alive():
            try:
                writing.draft.check()
            except Exception as error:
                self.abandon()
                raise self._told(error, writing.step) from error
        elif writing is not None:
            self._writing = None
            if writing.error is not None:
                raise self._told(writing.error, writing.step) from writing.error

    def finish(self) -> None:
        """Wait until nothing is being written, and say so where that takes long. Raises as `check` does."""
        asked = time.monotonic()
        say_at = asked + _FIRST_LINE_S
        while (writing := self._writing) is not None:
            now = time.monotonic()
            if now - asked > _ASK_S or not writing.thread.is_alive():
                self.check()
                asked = now
            if now > say_at:
                print(f"waiting for the checkpoint of step {writing.step}: {self._done(writing.draft)}", flush=True)
                say_at = now + _LINE_S
            self._meanwhile()
            writing.thread.join(_POLL_S)

    def abandon(self) -> None:
        """Give up what is being written, unless its files are all there: then it becomes a checkpoint all the same. A
        copy that is on its way is not waited for: it ends with the file that it is at, or with the process."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.draft.abandoned.set()
            while writing.thread.is_alive() and not writing.draft.whole.is_set():
                writing.thread.join(_POLL_S)

    def _complete(self, draft: Draft, step: int, best_step: int | None) -> None:
        temporary = draft.directory
        try:
            files = draft.complete()
            write_text(temporary / "manifest.json", json.dumps({"step": step, "files": files}, indent=1))
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # ranks may be writing still
            raise
        final, replaced = self._final(step), None
        if final.exists():  # of a run that went back, or was killed before it could call it the latest
            self._point_elsewhere(final)
            replaced = _hidden(final)
        os.rename(temporary, final)
        sync(self.directory)
        self._point_to_best(step, best_step)
        write_text(self.directory / "latest", final.name + "\n")  # a run killed before it repeats the step
        if replaced is not None:
            shutil.rmtree(replaced)
        self._prune(step)
        self.completed = final
        draft.whole.set()
        if self._remote is not None:
            with self._told_of(self._remote, final):
                self._push(self._remote, final, draft)

    def _push(self, remote: RemoteStore, final: Path, draft: Draft) -> None:
        named = {pointer: path.name for pointer in ("best", "latest") if (path := self._named(pointer)) is not None}
        remote.push(final, named, self._keep_last, draft.raise_if_abandoned)

    @contextmanager
    def _told_of(self, remote: RemoteStore, final: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever file system
            raise TandemError(
                f"trainer.checkpoint_url: {final.name} cannot be copied to {remote.url} ({error}); it is whole in "
                f"{final}: mend that, then continue with --resume {self.directory.parent}"
            ) from error

    def latest(self) -> Path | None:
        """The checkpoint to resume from, None before the first one; raises UserError when it is damaged."""
        checkpoint = self._named("latest")
        if checkpoint is not None:
            mend = f"write the name of an earlier one into {self.directory / 'latest'}, or delete that file"
            check_sound(checkpoint, f"{mend} to start anew")
        return checkpoint

    def best_of(self, step: int | None, checkpoint: Path) -> int | None:
        """Where the best value that `checkpoint` knows of has its own: at `step`, which older versions do not say, or
        where the pointer does; None where that is gone, here and at `remote`."""
        named = self._named("best")
        if step is None and named is not None and step_of(named.name) <= step_of(checkpoint.name):
            step = step_of(named.name)
        if step is None or self._final(step).exists():
            return step
        if self._remote is None:
            return None
        with self._told_of(self._remote, checkpoint):
            return step if self._remote.has_best(self._final(step).name) else None

    def _done(self, draft: Draft) -> str:
        """How far it is."""
        if self._remote is not None and draft.whole.is_set():
            return f"written, being copied to {self._remote.url}"
        try:
            written = sum(path.stat().st_size for path in draft.directory.rglob("*") if path.is_file())
        except FileNotFoundError:  # it has got its name meanwhile
            return "written"
        return f"{written / 2**30:.1f} GiB written"

    def _final(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _told(self, error: BaseException, step: int) -> BaseException:
        """What to raise for an error of a write: in a line where it is the disk's."""
        of_disk = next((number for number in _OF_DISKS if os.strerror(number) in str(error)), None)
        if of_disk is None and not isinstance(error, OSError):
            return error
        reason = error if of_disk is None else os.strerror(of_disk)
        what = f"cannot be written ({reason}); mend that"
        if of_disk == errno.ENOSPC:
            what = "no space left for this checkpoint; make room"
        return TandemError(
            f"{self._final(step)}: {what}, then continue from the one before it with --resume {self.directory.parent}"
        )

    def _named(self, pointer: str) -> Path | None:
        path = self.directory / pointer
        return read_pointer(path) if path.exists() else None

    def _point_elsewhere(self, replaced: Path) -> None:
        """While a checkpoint is replaced the latest is the one before, if there is one, and no longer is it the best,
        which its successor of the same step need not be."""
        earlier = [
            path.name for path in self.directory.glob("step_*") if 0 <= step_of(path.name) < step_of(replaced.name)
        ]
        if earlier and self._named("latest") == replaced:
            write_text(self.directory / "latest", max(earlier, key=step_of) + "\n")
        if self._named("best") == replaced:
            (self.directory / "best").unlink()

    def _point_to_best(self, step: int, best_step: int | None) -> None:
        """A run that went back may find the best one of before again, and must not keep one of steps that are gone."""
        best, named = None if best_step is None else self._final(best_step), self._named("best")
        if best is not None and best.exists():
            if best != named:
                write_text(self.directory / "best", best.name + "\n")
        elif named is not None and (best is not None or step_of(named.name) > step):
            (self.directory / "best").unlink()

    def _prune(self, step: int) -> None:
        found = {path.name: path for path in self.directory.glob("step_*")}
        best = self._named("best")
        kept = kept_names(found, step, self._keep_last, None if best is None else best.name)
        for name, path in found.items():
            if name not in kept:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        shutil.rmtree(_hidden(path))


def _hidden(path: Path) -> Path:
    """Where a checkpoint is that is to be deleted: a deletion that is cut short must not look like one."""
    trash = temporary_name(path.with_suffix(".deleted"))
    os.rename(path, trash)
    return trash


def step_of(name: str) -> int:
    """The step of a checkpoint, `step_000010`; -1 for any other name."""
    number = name.removeprefix("step_")
    return int(number) if number != name and number.isdecimal() else -1


def kept_names(names: Iterable[str], step: int, keep_last: int, best: str | None) -> set[str]:
    """Of checkpoints, those that stay once that of `step` is written: the newest, the best, and what is none of ours.
    Those of later steps are of a run that went back."""
    found = {name: step_of(name) for name in names if step_of(name) >= 0}
    newest = sorted(number for number in found.values() if number <= step)[-keep_last:]
    return {name for name in names if name not in found or found[name] in newest or name == best}


def check_sound(checkpoint: Path, mend: str) -> None:
    """UserError, which ends with `mend`, when the checkpoint is damaged."""
    problem = damage(checkpoint)
    if problem:
        raise UserError(f"{checkpoint}: damaged ({problem}); {mend}")


def damage(checkpoint: Path) -> str | None:
    """What differs between the files of a checkpoint and its manifest, content included; None: sound."""
    try:
        files = files_of(read_text(checkpoint / "manifest.json"))
        changed = [name for name, expected in files.items() if describe(checkpoint / name) != expected]
    except (OSError, ValueError) as error:
        return str(error)
    return f"not what was written: {', '.join(changed)}" if changed else None


def files_of(manifest: str) -> Mapping[str, object]:
    """What a manifest says of each file, by its path below the checkpoint. ValueError where it is none, or names what
    is not below it: it may have come from elsewhere."""
    try:
        files = parse_json(manifest)["files"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"manifest.json is no manifest: {type(error).__name__}: {error}") from None
    if not isinstance(files, dict) or not files:
        raise ValueError("manifest.json is no manifest: it names no files")
    for name in files:
        parts = name.split("/")
        if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"manifest.json names {name!r}, which is no path below the checkpoint")
    return files
