"""Pools of processes, and those of `cluster`."""

from collections.abc import Iterator

from tandem.config.tree import RolloutConfig


def pools_count_processes(config: RolloutConfig) -> Iterator[str]:
    if config.placement.pools and config.cluster.ranks is not None:
        yield f"placement: pools: say how many processes there are, so leave out cluster.ranks: {config.cluster.ranks}"


def pools_have_their_nodes(config: RolloutConfig) -> Iterator[str]:
    several = any(len(nodes) > 1 for nodes in config.placement.pools.values())
    if several and config.cluster.type == "local":
        yield "placement: pools: cluster.type: local is one node; give each pool one number, or use ray"
