"""Records of a run: metrics, trajectories, environment, report."""

from __future__ import annotations

from pathlib import Path

from tandem.tracking.base import Tracker


def open_trackers(run_dir: Path, total_steps: int, first_step: int = 0, *, tensorboard: bool = False) -> list[Tracker]:
    """metrics.jsonl, the console, TensorBoard on request; a resumed run goes on after `first_step`."""
    from tandem.tracking.console import ConsoleTracker
    from tandem.tracking.jsonl import JsonlTracker
    from tandem.tracking.tensorboard import TensorBoardTracker

    events: list[Tracker] = [TensorBoardTracker(run_dir / "tensorboard")] if tensorboard else []
    return [JsonlTracker(run_dir / "metrics.jsonl"), *events, ConsoleTracker(total_steps, first_step)]


__all__ = ["Tracker", "open_trackers"]
