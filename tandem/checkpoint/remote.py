"""Copies of a run's checkpoints in object storage, by whatever fsspec has a file system for.

    <url>/config.yaml, run_id                                the run's
    <url>/checkpoints/step_000010/{model/, state/, manifest.json}
    <url>/checkpoints/latest, best                           text files that hold a name: step_000010

There is no rename there, so the manifest comes last and goes first: what has none is no checkpoint.
"""

import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from tandem.checkpoint.draft import for_each
from tandem.checkpoint.run_dir import locked
from tandem.checkpoint.store import check_sound, files_of, kept_names, step_of
from tandem.errors import UserError
from tandem.files import sync_tree, temporary_name, write_text

_MANIFEST, _CONFIG = "manifest.json", "config.yaml"
_NAME = re.compile(r"step_\d{6,}")
_RUN_ID = "run_id"
"""A random number that a run gets when it is first copied: two runs may have the same settings, and the same steps."""


def check_url(url: str) -> None:
    """UserError where no file system is known, or installed, for a URL."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}; install fsspec's package for {protocol}://, or give another URL") from None


class RemoteCheckpoints:
    """The checkpoints of one run at a URL; belongs to the process that writes the run."""

    def __init__(self, url: str) -> None:
        check_url(url)
        self.url = url
        self._files: Any
        self._files, root = url_to_fs(url)
        self._root = root.rstrip("/")

    def claim(self, run_dir: Path) -> None:
        """Begin to copy the run in `run_dir` there: its config.yaml, so that what is wrong with the URL is known before
        the first checkpoint. UserError where it cannot be written, and where what is there would be lost: checkpoints
        of another run, or later ones than the run has."""
        own_id, latest = run_dir / _RUN_ID, run_dir / "checkpoints" / "latest"
        try:
            there = self._whole()
            newest = max(there, key=step_of, default="")
            if there and not (latest.exists() and own_id.exists() and own_id.read_text() == self._read(_RUN_ID)):
                raise UserError(
                    f"trainer.checkpoint_url: {self.url} holds the checkpoints of another run ({newest}) than "
                    f"{run_dir}; continue that run with --resume {self.url}, or give another URL"
                )
            if there and step_of(newest) > step_of(own := latest.read_text(encoding="utf-8").strip()):
                raise UserError(
                    f"trainer.checkpoint_url: {self.url} is further ({newest}) than {run_dir} ({own}), and going on "
                    f"from that would delete what is newer; continue with --resume {self.url}, or, to go back to "
                    f"{own}, delete the later ones there"
                )
            if not own_id.exists():
                write_text(own_id, f"{uuid.uuid4()}\n")
            for name in (_CONFIG, _RUN_ID):
                self._put(run_dir / name, self._path(name))
        except UserError:
            raise
        except Exception as error:  # of whatever file system
            raise UserError(
                f"trainer.checkpoint_url: {self.url} cannot be written ({error}); mend that, or give another URL"
            ) from error

    def has_best(self, name: str) -> bool:
        """The best checkpoint there is the one of this name."""
        return self._pointed("best") == name

    def is_behind(self, checkpoint: Path) -> bool:
        """What is there is older than this checkpoint, or another one of its name."""
        latest = self._pointed("latest") or ""
        if latest != checkpoint.name:
            return step_of(latest) < step_of(checkpoint.name)
        manifest = self._manifest(latest)
        return not self._files.exists(manifest) or (
            self._files.cat_file(manifest) != (checkpoint / _MANIFEST).read_bytes()
        )

    def push(self, checkpoint: Path, pointers: Mapping[str, str], keep_last: int, check: Callable[[], None]) -> None:
        """Copy a checkpoint that is complete, then the pointers to it, then delete others as `kept_names` says: the
        best one there stays, also where a run was fetched without it.

        `check` is called between files; what it raises ends this, and leaves what is no checkpoint.
        """
        check()
        name = checkpoint.name
        self._point_elsewhere(name, is_best=pointers.get("best") == name)
        self._delete(name)  # of a run that went back, or what a push that was cut short has left
        self._put(checkpoint.parents[1] / _CONFIG, self._path(_CONFIG))
        files = [path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()]

        def put(file: Path) -> None:
            check()
            self._put(checkpoint / file, self._path("checkpoints", name, *file.parts))

        for_each(put, (file for file in files if file != Path(_MANIFEST)))
        put(Path(_MANIFEST))
        for pointer, pointed in pointers.items():
            self._files.pipe_file(self._path("checkpoints", pointer), f"{pointed}\n".encode())
        names = self._names()
        for other in names - kept_names(names, step_of(name), keep_last, self._pointed("best")):
            self._delete(other)

    def fetch(self, run_dir: Path) -> None:
        """Make `run_dir` a run whose latest checkpoint is the one at the URL, unless its own is as new.

        Raises UserError where there is no checkpoint at the URL, or a damaged one, or `run_dir` holds another run.
        """
        name = self._read("checkpoints", "latest").strip()
        if not _NAME.fullmatch(name):
            said = f"{self.url}: checkpoints/latest says {name[:80]!r}"
            raise UserError(f"{said}; it is to name a checkpoint: step_000010")
        checkpoints = run_dir / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        with locked(run_dir):
            pointer, own_id, run_id = checkpoints / "latest", run_dir / _RUN_ID, self._read(_RUN_ID)
            if pointer.exists() and (not own_id.exists() or own_id.read_text() != run_id):
                raise UserError(f"{run_dir}: holds another run than {self.url}; give another trainer.run_dir")
            if pointer.exists() and step_of(pointer.read_text(encoding="utf-8").strip()) >= step_of(name):
                print(f"{run_dir} has a checkpoint as new as {name} of {self.url}: nothing is fetched", flush=True)
                return
            print(f"fetching {name} of {self.url} into {run_dir}", flush=True)
            self._fetch_checkpoint(name, checkpoints / name)
            if not (run_dir / _CONFIG).exists():
                write_text(run_dir / _CONFIG, self._read(_CONFIG))
            write_text(own_id, run_id)
            write_text(pointer, f"{name}\n")

    def config(self) -> str:
        """The run's config.yaml. UserError where there is none."""
        return self._read(_CONFIG)

    def _fetch_checkpoint(self, name: str, target: Path) -> None:
        temporary = temporary_name(target)
        for there in (temporary, target):
            if there.exists():
                shutil.rmtree(there)
        described = self._read("checkpoints", name, _MANIFEST)
        try:
            files = [*files_of(described)]
        except ValueError as error:
            raise UserError(
                f"{self.url}: {name}: {error}; name an earlier one in {self.url}/checkpoints/latest"
            ) from None

        def get(file: str) -> None:
            local = temporary / file
            local.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(self._path("checkpoints", name, file), str(local))

        try:
            for_each(get, files)
            write_text(temporary / _MANIFEST, described)
            check_sound(temporary, f"name an earlier one in {self.url}/checkpoints/latest")
            sync_tree(temporary)
        except FileNotFoundError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"{self.url}: {name} lacks a file of its manifest ({error})") from None
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        temporary.rename(target)

    def _put(self, file: Path, target: str) -> None:
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), target)

    def _read(self, *parts: str) -> str:
        try:
            return self._files.cat_file(self._path(*parts)).decode()
        except FileNotFoundError:
            raise UserError(f"{self.url}: no checkpoint of a run there (no {'/'.join(parts)})") from None
        except Exception as error:  # of whatever file system
            raise UserError(f"{self.url}: cannot be read ({error}); mend that, or give another URL") from error

    def _pointed(self, pointer: str) -> str | None:
        path = self._path("checkpoints", pointer)
        return self._files.cat_file(path).decode().strip() if self._files.exists(path) else None

    def _names(self) -> set[str]:
        folder = self._path("checkpoints")
        found: list[str] = self._files.ls(folder, detail=False) if self._files.exists(folder) else []
        names = {path.rstrip("/").rpartition("/")[2] for path in found}
        return {name for name in names if name.startswith("step_")}

    def _whole(self) -> set[str]:
        """Without those whose copy, or deletion, was cut short."""
        return {name for name in self._names() if self._files.exists(self._manifest(name))}

    def _point_elsewhere(self, name: str, is_best: bool) -> None:
        """While the checkpoint `name` is replaced, nothing points to it: the latest is meanwhile the one before."""
        if self._pointed("best") == name and not is_best:
            self._files.rm_file(self._path("checkpoints", "best"))
        if self._pointed("latest") != name:
            return
        others, pointer = self._whole() - {name}, self._path("checkpoints", "latest")
        if others:
            self._files.pipe_file(pointer, f"{max(others, key=step_of)}\n".encode())
        else:
            self._files.rm_file(pointer)

    def _delete(self, name: str) -> None:
        """The manifest first: what a deletion that is cut short leaves must not look like a checkpoint."""
        folder, manifest = self._path("checkpoints", name), self._manifest(name)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def _manifest(self, name: str) -> str:
        return self._path("checkpoints", name, _MANIFEST)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))
