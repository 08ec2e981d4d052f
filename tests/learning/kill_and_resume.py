"""Runs a training again and again, killed at some point and resumed. Prints `done` when every one ended the same.

A program of its own: it forks after the expensive imports, which only a process without threads may do.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import tandem.checkpoint.store
import tandem.jobs.rl
from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories

KILLS = 10


def child(arguments: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Fork `tandem ARGUMENTS`; returns the process id."""
    process = os.fork()
    if process:
        return process
    try:
        before()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(arguments))
    except BaseException:  # noqa: BLE001  whatever it is, a forked child must not return
        traceback.print_exc()
        os._exit(1)


def finished(process: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def kill_at_save(nth: int) -> Callable[[], None]:
    """The process kills itself inside its `nth` checkpoint, files written and not yet moved into place."""

    def arm() -> None:
        original = tandem.checkpoint.store.sync_tree
        calls = 0

        def sync_tree(directory: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            original(directory)

        tandem.checkpoint.store.sync_tree = sync_tree

    return arm


def outcome(run: Path, steps: int) -> dict[str, Any]:
    """What must not depend on kills."""
    numbers = [
        {name: value for name, value in record.items() if not name.startswith(("time/", "perf/"))}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    weights = {
        str(path.relative_to(checkpoint)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        if path.suffix in (".safetensors", ".distcp")
    }
    used = [
        read_trajectories(run / "trajectories" / f"step_{step:06d}.parquet", ["prompt_index"])[
            "prompt_index"
        ].to_pylist()
        for step in range(1, steps + 1)
    ]
    return {"numbers": numbers, "weights": weights, "used": used}


def run_all(config: str, directory: Path, steps: int) -> None:
    def arguments(run: Path) -> list[str]:
        return ["train", config, f"trainer.run_dir={run}"]

    start = time.monotonic()
    assert finished(child(arguments(directory / "whole")))
    seconds = time.monotonic() - start
    expected = outcome(directory / "whole", steps)
    assert len(expected["weights"]) == 4, "policy and critic, weights and optimizer"
    rows = [index for indices in expected["used"] for index in sorted(set(indices))]
    epoch = len(set(rows))
    assert all(sorted(rows[i : i + epoch]) == sorted(set(rows)) for i in range(0, len(rows), epoch)), "once an epoch"
    rng = random.Random(0)
    for kill in range(KILLS):
        run = directory / f"killed_{kill}"
        if kill == 0:
            os.waitpid(child(arguments(run), kill_at_save(2)), 0)
        else:
            process = child(arguments(run))
            time.sleep(rng.uniform(0.1, 0.95) * seconds)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        reached = len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
        resume = ["train", "--resume", str(run)] if (run / "config.yaml").exists() else arguments(run)
        assert finished(child(resume)), f"kill {kill}: the resumed run failed"
        assert outcome(run, steps) == expected, f"kill {kill}: another outcome"
        print(f"kill {kill}: after {reached} of {steps} steps, same outcome", flush=True)
        shutil.rmtree(run)
    print("done")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"kills": KILLS}))
