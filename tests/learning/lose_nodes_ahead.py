"""Loses a node of Ray while answers are generated ahead of training, on a node of their own. Prints what came of it.

    python lose_nodes_ahead.py CONFIG DIRECTORY

The pools `training` and `generation` of CONFIG have a process each, and a third node is spare. A run goes on from its
checkpoint after each loss, and what it trained in the end is looked at.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from disturb_stages import arm
from kill_and_resume import lines
from lose_workers import Nodes, check_trained, children, train

import tandem.cluster.ray
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.rollouts import RolloutProducer

LOSSES = [("take", "generation"), ("publish", "generation"), ("publish", "training"), ("learn", "generation")]
"""The stage, and whose node is lost in it."""


class Three(Nodes):
    """Nodes with room for one process each."""

    count = 3

    def kill_node_of(self, pool: str) -> None:
        seen: list[bytes] = []
        for node in list(self.cluster.worker_nodes):
            processes = children(node.all_processes["raylet"][0].process.pid)
            names = [Path(f"/proc/{process}/cmdline").read_bytes() for process in processes]
            seen += names
            if any(f"{pool} rank".encode() in name for name in names):
                for process in processes:
                    os.kill(process, signal.SIGKILL)
                self.cluster.remove_node(node, allow_graceful=False)
                print(f"lost the node of {pool}: {[name[:40] for name in names]}", file=sys.stderr, flush=True)
                return
        raise AssertionError(f"no node has pool {pool}: {[name[:60] for name in seen]}")


def lose(config: str, directory: Path) -> None:
    settings, start = load_config(TrainConfig, Path(config)), time.monotonic()
    tandem.cluster.ray._CPUS = 1.0  # so that each process takes a node of its own
    nodes = Three()
    for number, (stage, pool) in enumerate(LOSSES):
        original = {name: vars(RolloutProducer)[name] for name in ("take", "publish")}
        arm(stage, 3, 0.0, partial(nodes.kill_node_of, pool))
        run = directory / f"lost_{number}"
        restarts = train(config, run)
        assert restarts == 1, f"{stage}: {restarts} restarts"
        repeated = lines(run / "metrics.jsonl") - (settings.trainer.steps or 0)
        told = f"the node of {pool} lost in {stage}: went on, {repeated} steps repeated"
        print(f"{told}, {check_trained(run, settings)}", flush=True)
        for name, method in original.items():
            setattr(RolloutProducer, name, method)
        nodes.complete()
    print(f"{len(LOSSES)} nodes lost, done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    lose(sys.argv[1], Path(sys.argv[2]))
