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
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from kill_and_resume import lines, outcome

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig


def train(
    config: str, run: Path, disturb: Callable[[], None] | None = None, step: int = 0, after_s: float = 0.0
) -> int:
    """One run to its end, disturbed a moment after `step`; how often it was restarted."""
    done = threading.Event()

    def watch() -> None:
        while lines(run / "metrics.jsonl") < step and not done.wait(0.005):
            pass
        if disturb and not done.wait(after_s):
            disturb()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with redirect_stdout(StringIO()) as said:
        status = main(["train", config, f"trainer.run_dir={run}"])
    done.set()
    watcher.join()
    assert status == 0, f"{run} ended with status {status}: {said.getvalue()[-3000:]}"
    return said.getvalue().count("restarting from the last checkpoint")


def kill_one(rng: random.Random) -> None:
    workers = [process for process in multiprocessing.active_children() if "rank" in process.name]
    os.kill(rng.choice(workers).pid or 0, signal.SIGKILL)


class Nodes:
    """A head without CPUs, and two nodes of which one holds the workers."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.complete()
        self._cluster.connect()

    def complete(self) -> None:
        """Replace what was killed."""
        while len(self._cluster.worker_nodes) < 2:
            self._cluster.add_node(num_cpus=1)

    def kill(self) -> None:
        """The node with the workers, and all that runs there: by itself that would notice only after a while."""
        for node in list(self._cluster.worker_nodes):
            processes = _children(node.all_processes["raylet"][0].process.pid)
            if any(_busy(process) for process in processes):
                for process in processes:
                    os.kill(process, signal.SIGKILL)
                self._cluster.remove_node(node, allow_graceful=False)


def _busy(process: int) -> bool:
    name = Path(f"/proc/{process}/cmdline").read_bytes()
    return name.startswith(b"ray::") and not any(other in name for other in (b"IDLE", b"Agent"))


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found += [int(stat.parent.name)] if int(stat.read_text().rpartition(")")[2].split()[1]) == parent else []
    return found


def lose(config: str, directory: Path, times: int, seed: int) -> None:
    settings = load_config(TrainConfig, Path(config))
    steps = settings.trainer.steps or 0
    rng = random.Random(seed)
    nodes = Nodes() if settings.cluster.type == "ray" else None
    start = time.monotonic()
    assert train(config, directory / "whole") == 0
    expected = outcome(directory / "whole", steps)
    for number in range(times):
        run = directory / f"disturbed_{number}"
        disturb = nodes.kill if nodes else lambda: kill_one(rng)
        restarts = train(config, run, disturb, rng.randint(1, steps - 2), rng.uniform(0, 0.05))
        assert restarts == 1, f"{run}: {restarts} restarts"
        assert outcome(run, steps) == expected, f"{run}: another outcome"
        print(f"{number + 1}: same outcome, {lines(run / 'metrics.jsonl') - steps} steps repeated", flush=True)
        if nodes:
            nodes.complete()
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    lose(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
