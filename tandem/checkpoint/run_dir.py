"""The run directory: one run a directory, and a resumed run is the same run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import UserError
from tandem.files import temporary_name, write_text

_FREE = (
    "tracking.", "trainer.run_dir", "trainer.steps", "trainer.epochs", "trainer.resume", "trainer.best_metric",
    "trainer.eval_every", "trainer.save_every", "trainer.keep_last", "trainer.trajectories_every",
)  # fmt: skip
"""How long a run goes and what it records; a resumed run may change that."""


def open_run_dir(path: Path, config_yaml: str, resume: bool) -> list[str]:
    """Make `path` the directory of the run that `config_yaml` (the resolved configuration) describes.

    Returns the differences from the configuration being resumed, as `key: old -> new`; empty for a new run. Raises
    UserError when `path` holds something else, another run (unless that failed before its first step), or the same run
    with other settings.
    """
    stored = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give trainer.run_dir a directory")
    path.mkdir(parents=True, exist_ok=True)
    found = sorted(entry.name for entry in path.iterdir() if entry != temporary_name(stored))
    if found and not stored.exists():
        raise UserError(f"{path}: not a run (no config.yaml, but {', '.join(found[:3])}); give another trainer.run_dir")
    started = (path / "checkpoints").exists() or (path / "metrics.jsonl").exists()
    if started and not resume:
        raise UserError(f"{path}: holds another run; continue it with --resume {path}, or give another trainer.run_dir")
    changes = _changes(stored, config_yaml) if started else []
    write_text(stored, config_yaml)
    return changes


def _changes(stored: Path, config_yaml: str) -> list[str]:
    """Differences that a resumed run may have; raises UserError on others."""
    before = dict(_leaves(yaml.safe_load(stored.read_text(encoding="utf-8"))))
    after = dict(_leaves(yaml.safe_load(config_yaml)))
    allowed: list[str] = []
    forbidden: list[str] = []
    for key in {**before, **after}:
        old, new = before.get(key, "(absent)"), after.get(key, "(absent)")
        if old != new:
            (allowed if key.startswith(_FREE) else forbidden).append(f"{key}: {old} -> {new}")
    if forbidden:
        mend = "give the old values, or another trainer.run_dir for a new run"
        listed = "".join(f"\n  - {change}" for change in forbidden)
        raise UserError(f"{stored.parent}: cannot be resumed with other settings; {mend}{listed}")
    return allowed


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a section."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
