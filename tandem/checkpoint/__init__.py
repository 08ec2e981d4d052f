"""Checkpoints and the run directory: what survives a crash."""

from tandem.checkpoint.run_dir import open_run_dir
from tandem.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "open_run_dir"]
