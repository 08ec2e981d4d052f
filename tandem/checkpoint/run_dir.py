"""The run directory: one run a directory, and a resumed run is the same run."""

from typing import Any

from tandem.config.load import dump_config, load_config
from tandem.config.resume import Change, changes
from tandem.config.tree import SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.files import temporary_name, write_text

CONFIG = "config.yaml"
_COMMAND = "trainer.resume"
"""A key that says what to do now; it is no setting of the run."""


def open_run_dir(config: TrainConfig | SftConfig) -> list[Change]:
    """Make `trainer.run_dir` the directory of the run that `config` describes.

    Returns what differs from the settings that the run in it has had so far. Raises UserError as `check_run_dir` does.
    """
    changed = check_run_dir(config)
    path = config.trainer.run_dir
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / CONFIG, dump_config(config))
    return changed


def check_run_dir(config: TrainConfig | SftConfig) -> list[Change]:
    """What `open_run_dir` would return; nothing is written.

    Raises UserError when the directory holds something else, another run (unless that failed before its first step), or
    the same run with other values of keys that a resumed run must keep.
    """
    path, stored = config.trainer.run_dir, config.trainer.run_dir / CONFIG
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give trainer.run_dir a directory")
    found = sorted(entry.name for entry in path.iterdir() if entry != temporary_name(stored)) if path.exists() else []
    if found and not stored.exists():
        raise UserError(f"{path}: not a run (no {CONFIG}, but {', '.join(found[:3])}); give another trainer.run_dir")
    if not (path / "checkpoints").exists() and not (path / "metrics.jsonl").exists():
        return []
    if not config.trainer.resume:
        raise UserError(f"{path}: holds another run; continue it with --resume {path}, or give another trainer.run_dir")
    kind: Any = type(config)
    changed = [change for change in changes(load_config(kind, stored), config) if change.key != _COMMAND]
    if fixed := [change for change in changed if not change.allowed]:
        listed = "".join(f"\n  - {change}" for change in fixed)
        raise UserError(
            f"{path}: cannot be resumed with other values of these keys, which decide what a run learns; give the old "
            f"values, or give another trainer.run_dir{listed}"
        )
    return changed
