"""Copies of a run's checkpoints in object storage, by whatever fsspec has a file system for.

    <url>/config.yaml                                        the run's
    <url>/checkpoints/step_000010/{model/, state/, manifest.json}
    <url>/checkpoints/latest, best                           text files that hold a name: step_000010

There is no rename there, so the manifest comes last and goes first: what has none is no checkpoint.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from tandem.checkpoint.draft import for_each
from tandem.checkpoint.run_dir import locked
from tandem.checkpoint.store import check_sound, kept_names
from tandem.errors import UserError
from tandem.files import sync_tree, temporary_name, write_text

_MANIFEST, _CONFIG = "manifest.json", "config.yaml"


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
        the first checkpoint. UserError where it cannot be written, and where the checkpoints there are not this run's,
        which would delete them."""
        try:
            there = self._names()
            if there and not (run_dir / "checkpoints" / "latest").exists():
                raise UserError(
                    f"trainer.checkpoint_url: {self.url} holds the checkpoints of a run ({max(there)}), and {run_dir} "
                    f"has none; continue that run with --resume {self.url}, or give another URL"
                )
            self._put(run_dir / _CONFIG, self._path(_CONFIG))
        except UserError:
            raise
        except Exception as error:  # of whatever file system
            raise UserError(
                f"trainer.checkpoint_url: {self.url} cannot be written ({error}); mend that, or give another URL"
            ) from error

    def is_behind(self, checkpoint: Path) -> bool:
        """What is there is older than this checkpoint, or another one of its name."""
        latest = self._pointed("latest") or ""
        if latest != checkpoint.name:
            return latest < checkpoint.name
        manifest = self._path("checkpoints", latest, _MANIFEST)
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
        for other in names - kept_names(names, int(name[5:]), keep_last, self._pointed("best")):
            self._delete(other)

    def fetch(self, run_dir: Path) -> None:
        """Make `run_dir` a run whose latest checkpoint is the one at the URL, unless its own is as new.

        Raises UserError where there is no checkpoint at the URL, or a damaged one.
        """
        name = self._read("checkpoints", "latest").strip()
        checkpoints = run_dir / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        with locked(run_dir):
            pointer = checkpoints / "latest"
            if pointer.exists() and pointer.read_text(encoding="utf-8").strip() >= name:
                print(f"{run_dir} has a checkpoint as new as {name} of {self.url}: nothing is fetched", flush=True)
                return
            print(f"fetching {name} of {self.url} into {run_dir}", flush=True)
            self._fetch_checkpoint(name, checkpoints / name)
            if not (run_dir / _CONFIG).exists():
                write_text(run_dir / _CONFIG, self._read(_CONFIG))
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
        files: list[str] = [*json.loads(described)["files"]]

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

    def _delete(self, name: str) -> None:
        """The manifest first: what a deletion that is cut short leaves must not look like a checkpoint."""
        folder = self._path("checkpoints", name)
        if self._files.exists(f"{folder}/{_MANIFEST}"):
            self._files.rm_file(f"{folder}/{_MANIFEST}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))
