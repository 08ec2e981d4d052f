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

from disturb_stages import STAGES, arm
from kill_and_resume import lines
from lose_workers import Nodes, check_trained, children, train
from ray.util import placement_group_table

import tandem.cluster.ray
from tandem.cluster.ray import RayCluster, RayRanks
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import ResourcePool

LOSSES = [("take", "generation"), ("publish", "generation"), ("publish", "training"), ("save", "training")]
"""The stage, and whose node is lost in it."""


class Three(Nodes):
    """Nodes with room for one process each."""

    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.node_of: dict[str, str] = {}
        spawn = RayCluster.spawn

        def noted(cluster: RayCluster, pool: ResourcePool) -> RayRanks:
            ranks = spawn(cluster, pool)
            self.node_of[pool.name] = placement_group_table(ranks._group)["bundles_to_node_id"][0]
            return ranks

        RayCluster.spawn = noted  # type: ignore[method-assign]

    def kill_node_of(self, pool: str) -> None:
        assert len(set(self.node_of.values())) == 2, "each pool has a node"
        node = next(node for node in self.cluster.worker_nodes if node.node_id == self.node_of[pool])
        for process in children(node.all_processes["raylet"][0].process.pid):
            os.kill(process, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)


def lose(config: str, directory: Path) -> None:
    settings, start = load_config(TrainConfig, Path(config)), time.monotonic()
    tandem.cluster.ray._CPUS = 1.0  # so that each process takes a node of its own
    nodes = Three()
    for number, (stage, pool) in enumerate(LOSSES):
        original = [(owner, name, getattr(owner, name)) for owner, name in STAGES.values()]
        arm(stage, 3, 0.0, partial(nodes.kill_node_of, pool))
        run = directory / f"lost_{number}"
        restarts = train(config, run)
        assert restarts == 1, f"{stage}: {restarts} restarts"
        repeated = lines(run / "metrics.jsonl") - (settings.trainer.steps or 0)
        told = f"the node of {pool} lost in {stage}: went on, {repeated} steps repeated"
        print(f"{told}, {check_trained(run, settings)}", flush=True)
        for owner, name, method in original:
            setattr(owner, name, method)
        nodes.complete()
    print(f"{len(LOSSES)} nodes lost, done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    lose(sys.argv[1], Path(sys.argv[2]))
