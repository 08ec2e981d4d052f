"""A run as a tracker sees it: a directory, lines in metrics.jsonl, samples; and maybe no end.

    python tracked_program.py RUN TRACKING FIRST_STEP LAST_STEP [kill]

With `kill` the process kills itself when the trackers have taken the step before the last one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.config.tracking import TrackingConfig
from tandem.pictures.store import PictureStore
from tandem.tracking.jsonl import JsonlRecorder
from tandem.tracking.tracker_thread import TrackerThread
from tandem.tracking.trackers import chosen_trackers
from tandem.tracking.trajectories import trajectories_path, validation_path

CONFIG = "trainer: {steps: 5}\nmodel: {path: /models/small}\nclient: {api_key: hunter2}\n"


def metrics_of(step: int) -> dict[str, float]:
    validation = {"val/sort4/acc/mean@4": step / 100} if step % 2 == 0 else {}
    parts = {f"reward/part_{number}": number / 1200 for number in range(1200)}  # more than one call, more than a block
    return ({"reward/mean": step / 10, "actor/kl": float("nan"), **parts} if step else {}) | validation


def write_samples(path: Path, step: int) -> None:
    """Of step 4 one prompt shows two pictures, another one, the last none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    store = PictureStore(path.parent.parent / "pictures")
    keys = [store.add(np.full((4, 8, 3), shade, np.uint8)) for shade in (10, 200)]
    shown = [[{"key": key} for key in some] for some in (keys, keys[:1], [])]
    columns = {
        "trajectory": [0, 1, 2],
        "branch": [0, 0, 0],
        "prompt": ["1+1=", "1+2=", "1+3="],
        "response": ["2", "3", "five"],
        "reward": [1.0, 0.5, None],
        "advantage": [0.5, -0.5, 0.0],
        "pictures": shown if step == 4 else [None, None, None],
    }
    pq.write_table(pa.table(columns), path)


def main(run: Path, tracking: str, first_step: int, last_step: int, kill: bool) -> None:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "environment.json").write_text('{"git_revision": "abc", "packages": {"torch": "2"}}')
    recorders = [JsonlRecorder(run / "metrics.jsonl")]
    chosen = list(chosen_trackers(TrackingConfig.model_validate_json(tracking)))
    mistakes = [f"{one.key}: {problem}" for one in chosen for problem in one.kind().check(one.given())]
    if mistakes:
        sys.exit("\n".join(mistakes))
    recorders += [TrackerThread(one.name, one.make, one.options, run, first_step) for one in chosen]
    for step in range(first_step + 1 if first_step else 0, last_step + 1):
        if step:
            write_samples(trajectories_path(run, step), step)
        write_samples(validation_path(run, step), step)
        for recorder in recorders:
            recorder.log(step, metrics_of(step))
    while kill:
        sent = [json.loads((run / "trackers" / f"{one.name}.json").read_text())["step"] for one in chosen]
        if min(sent) >= last_step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    for recorder in recorders:
        recorder.close("finished")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:] == ["kill"])
