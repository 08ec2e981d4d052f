"""Trains again and again, a worker or a node killed at some moment, with trainer.max_restarts. Prints what came of it.

    python lose_workers.py CONFIG DIRECTORY TIMES [seed]

With `cluster.type: ray` in CONFIG a whole node of two on this machine is killed, else one process. Where answers go on
over a publish, no two runs are alike: then one run, or a few, go through all losses, and what was trained is looked at.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path

from kill_and_resume import check_epochs, lines, outcome

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.tracking.trajectories import read_trajectories


def train(
    config: str,
    run: Path,
    disturb: Callable[[threading.Event], None] | None = None,
    step: int = 0,
    after_s: float = 0.0,
) -> int:
    """One run to its end, disturbed a moment after `step`; how often it was restarted. `disturb` is told the end."""
    done = threading.Event()

    def watch() -> None:
        while lines(run / "metrics.jsonl") < step and not done.wait(0.005):
            pass
        if disturb and not done.wait(after_s):
            disturb(done)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with redirect_stdout(StringIO()) as said:
        status = main(["train", config, f"trainer.run_dir={run}"])
    done.set()
    watcher.join()
    assert status == 0, f"{run} ended with status {status}: {said.getvalue()[-3000:]}"
    return said.getvalue().count("restarting from the last checkpoint")


def survive(settings: TrainConfig, config: str, directory: Path, times: int, seed: int) -> None:
    """Every prompt is trained once an epoch, and no token is staler than the bound, whatever dies."""
    rng, start, lost, number = random.Random(seed), time.monotonic(), 0, 0
    while lost < times:
        assert number <= times, f"only {lost} workers were lost in {number} runs"
        run, killed = directory / f"survived_{number}", Counter[str]()
        restarts = train(config, run, partial(kill_many, run, rng, times - lost, killed))
        assert restarts <= killed.total(), f"{run}: {restarts} restarts, lost were {killed}"
        staleness = check_trained(run, settings)
        lost, number = lost + killed.total(), number + 1
        repeated = lines(run / "metrics.jsonl") - (settings.trainer.steps or 0)
        print(
            f"{run.name}: lost {dict(killed)}, {restarts} restarts, {repeated} steps repeated, {staleness}", flush=True
        )
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


def kill_many(run: Path, rng: random.Random, times: int, killed: Counter[str], done: threading.Event) -> None:
    """Kill one worker after another: mostly after a further step, else at any time, also while others start."""
    while killed.total() < times and not done.is_set():
        seen, patience_s = lines(run / "metrics.jsonl"), 60.0 if rng.random() < 0.7 else rng.uniform(0, 4)
        limit = time.monotonic() + patience_s
        while lines(run / "metrics.jsonl") == seen and time.monotonic() < limit and not done.wait(0.005):
            pass
        if not done.wait(rng.uniform(0, 0.3)) and (workers := _workers()):
            victim = rng.choice(workers)
            os.kill(victim.pid or 0, signal.SIGKILL)
            killed[victim.name] += 1


def check_trained(run: Path, settings: TrainConfig) -> str:
    """Of the last record of each step: its prompts, and how stale its tokens are."""
    steps, most = settings.trainer.steps or 0, settings.trainer.max_staleness
    used: list[int] = []
    staleness: Counter[int] = Counter()
    for step in range(1, steps + 1):
        rows = read_trajectories(run / f"trajectories/step_{step:06d}.parquet").to_pylist()
        used += {row["group"]: row["prompt_index"] for row in rows}.values()
        for row in rows:
            trained = zip(row["policy_versions"], row["loss_mask"], strict=True)
            staleness.update(step - 1 - version for version, own in trained if own)
    assert set(staleness) <= set(range(most + 1)), f"{run}: versions behind the trainer: {staleness}"
    assert len(used) == steps * settings.data.prompts_per_step
    check_epochs(used)
    return f"tokens by staleness {dict(sorted(staleness.items()))}"


def _workers() -> list[multiprocessing.process.BaseProcess]:
    return [process for process in multiprocessing.active_children() if "rank" in process.name]


def kill_one(rng: random.Random) -> None:
    os.kill(rng.choice(_workers()).pid or 0, signal.SIGKILL)


class Nodes:
    """A head without CPUs, and two nodes of which one holds the workers."""

    count = 2

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.complete()
        self.cluster.connect()

    def complete(self) -> None:
        """Replace what was killed."""
        while len(self.cluster.worker_nodes) < self.count:
            self.cluster.add_node(num_cpus=1)

    def kill(self) -> None:
        """The node with the workers, and all that runs there: by itself that would notice only after a while."""
        for node in list(self.cluster.worker_nodes):
            processes = children(node.all_processes["raylet"][0].process.pid)
            if any(_busy(process) for process in processes):
                for process in processes:
                    os.kill(process, signal.SIGKILL)
                self.cluster.remove_node(node, allow_graceful=False)


def _busy(process: int) -> bool:
    name = Path(f"/proc/{process}/cmdline").read_bytes()
    return name.startswith(b"ray::") and not any(other in name for other in (b"IDLE", b"Agent"))


def children(parent: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found += [int(stat.parent.name)] if int(stat.read_text().rpartition(")")[2].split()[1]) == parent else []
    return found


def lose(config: str, directory: Path, times: int, seed: int) -> None:
    settings = load_config(TrainConfig, Path(config))
    steps = settings.trainer.steps or 0
    if settings.trainer.max_staleness and settings.generation.partial_rollouts and settings.cluster.type == "local":
        survive(settings, config, directory, times, seed)
        return
    rng = random.Random(seed)
    nodes = Nodes() if settings.cluster.type == "ray" else None
    start = time.monotonic()
    assert train(config, directory / "whole") == 0
    expected = outcome(directory / "whole", steps)
    for number in range(times):
        run = directory / f"disturbed_{number}"
        disturb = (lambda _: nodes.kill()) if nodes else (lambda _: kill_one(rng))
        restarts = train(config, run, disturb, rng.randint(1, steps - 2), rng.uniform(0, 0.05))
        assert restarts == 1, f"{run}: {restarts} restarts"
        assert outcome(run, steps) == expected, f"{run}: another outcome"
        print(f"{number + 1}: same outcome, {lines(run / 'metrics.jsonl') - steps} steps repeated", flush=True)
        if nodes:
            nodes.complete()
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    lose(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
