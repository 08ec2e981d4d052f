"""Trains again and again, a worker or a node killed at some moment, with trainer.max_restarts. Prints what came of it.

    python lose_workers.py CONFIG DIRECTORY TIMES [seed]

With `cluster.type: ray` in CONFIG a whole node of two on this machine is killed, else one process.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kill_and_resume import outcome

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.tracking.jsonl import read_metrics


def train(config: str, run: Path, disturb: Callable[[], None] | None = None, after_s: float = 0.0) -> None:
    """One run to its end; `disturb` happens `after_s` after the first step."""
    done = threading.Event()

    def watch() -> None:
        while not (run / "metrics.jsonl").exists() and not done.wait(0.01):
            pass
        if disturb and not done.wait(after_s):
            disturb()

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = main(["train", config, f"trainer.run_dir={run}"])
    done.set()
    watcher.join()
    assert status == 0, f"{run} ended with status {status}"


def kill_one(rng: random.Random) -> None:
    workers = [process for process in multiprocessing.active_children() if "rank" in process.name]
    os.kill(rng.choice(workers).pid or 0, signal.SIGKILL)


class Nodes:
    """A head without CPUs and a node that holds the workers; whoever kills it starts another."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._node = self._cluster.add_node(num_cpus=1)
        self._cluster.connect()

    def kill(self) -> None:
        dead, self._node = self._node, self._cluster.add_node(num_cpus=1)
        self._cluster.remove_node(dead, allow_graceful=False)


def lose(config: str, directory: Path, times: int, seed: int) -> None:
    settings = load_config(TrainConfig, Path(config))
    steps = settings.trainer.steps or 0
    rng = random.Random(seed)
    disturb: Callable[[], None] = Nodes().kill if settings.cluster.type == "ray" else lambda: kill_one(rng)
    train(config, directory / "whole")
    start = time.monotonic()
    expected = outcome(directory / "whole", steps)
    seconds = sum(record["time/step_s"] for record in read_metrics(directory / "whole/metrics.jsonl"))
    for number in range(times):
        run = directory / f"disturbed_{number}"
        train(config, run, disturb, rng.uniform(0, 0.9) * seconds)
        assert outcome(run, steps) == expected, f"{run}: another outcome"
        repeated = (run / "metrics.jsonl").read_text().count("\n") - steps
        print(f"{number + 1}: same outcome, {repeated} steps repeated", flush=True)
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    lose(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
