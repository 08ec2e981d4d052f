"""The run directory: one run a directory, and a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import UserError
from tandem.files import remove_leftovers, write_text

_FREE = (
    "tracking",
    "trainer.run_dir",
    "trainer.steps",
    "trainer.epochs",
    "trainer.resume",
    "trainer.eval_every",
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.best_metric",
    "trainer.trajectories_every",
)
"""Sections and keys that say how long a run goes and what it records; a resumed run may change them."""


def open_run_dir(path: Path, config_yaml: str, resume: bool) -> list[str]:
    """Make `path` the directory of the run that `config_yaml` (the resolved configuration) describes.

    Writes `config.yaml`. Returns the differences from the configuration being resumed, as `key: old -> new`; empty for
    a new run. Raises UserError when `path` holds something else, another run, or the same run with other settings.
    """
    stored = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give trainer.run_dir a directory")
    path.mkdir(parents=True, exist_ok=True)
    changes: list[str] = []
    if stored.exists():
        if not resume:
            raise UserError(
                f"{path}: holds another run; continue it with --resume {path}, "
                f"give trainer.run_dir another directory, or delete this one"
            )
        changes = _changes(stored, config_yaml)
        remove_leftovers(path)
    else:
        _check_unused(path)
    write_text(stored, config_yaml)
    return changes


def _check_unused(path: Path) -> None:
    foreign = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".config.yaml.tmp-"))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise UserError(
            f"{path}: not empty and not a run (no config.yaml, but {shown}); give trainer.run_dir another directory"
        )
    remove_leftovers(path)


def _changes(stored: Path, config_yaml: str) -> list[str]:
    """Differences that a resumed run may have; raises UserError on others."""
    try:
        old = yaml.safe_load(stored.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{stored}: not valid YAML, so the run cannot be resumed: {error}") from None
    before, after = dict(_leaves(old)), dict(_leaves(yaml.safe_load(config_yaml)))
    changed = [key for key in {**before, **after} if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
    described = {key: f"{key}: {before.get(key, _ABSENT)} -> {after.get(key, _ABSENT)}" for key in changed}
    forbidden = [text for key, text in described.items() if not any(f"{key}.".startswith(f"{free}.") for free in _FREE)]
    if forbidden:
        listed = "\n".join(f"  - {text}" for text in forbidden)
        raise UserError(
            f"{stored.parent}: cannot be resumed with other settings; "
            f"give the old values, or start a new run in another trainer.run_dir\n{listed}"
        )
    return list(described.values())


_ABSENT = "(absent)"


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a section."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
