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


def open_run_dir(path: Path, config_yaml: str, resume: bool) -> None:
    """Make `path` the directory of the run that `config_yaml` (the resolved configuration) describes.

    Raises UserError when it holds something else, another run (unless that failed before its first step), or the same
    run with other settings.
    """
    stored = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give trainer.run_dir a directory")
    path.mkdir(parents=True, exist_ok=True)
    found = sorted(entry.name for entry in path.iterdir() if entry != temporary_name(stored))
    if found and not stored.exists():
        raise UserError(f"{path}: not a run (no config.yaml, but {', '.join(found[:3])}); give another trainer.run_dir")
    if (path / "checkpoints").exists() or (path / "metrics.jsonl").exists():
        mend = "or give another trainer.run_dir"
        if not resume:
            raise UserError(f"{path}: holds another run; continue it with --resume {path}, {mend}")
        before, after = _settings(stored.read_text(encoding="utf-8")), _settings(config_yaml)
        changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if changed:
            listed = "".join(f"\n  - {key}: {before.get(key)} -> {after.get(key)}" for key in changed)
            raise UserError(f"{path}: cannot be resumed with other settings; give the old values, {mend}{listed}")
    write_text(stored, config_yaml)


def _settings(config_yaml: str) -> dict[str, Any]:
    """Dotted key -> value of everything that a resumed run must keep."""
    return {key: value for key, value in _leaves(yaml.safe_load(config_yaml)) if not key.startswith(_FREE)}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a section."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
