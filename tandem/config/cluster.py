"""Processes, and which roles share them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Tag

from tandem.config.base import PositiveFloat, PositiveInt, Section, by_type, rule


class LocalClusterConfig(Section):
    """This machine: one rank is this process itself, more are processes of their own."""

    type: Literal["local"] = "local"
    ranks: PositiveInt | None = None
    """Processes of the one pool that all roles share, default 1; not together with `placement.pools`."""
    timeout_s: PositiveFloat = 1800.0
    """A call that takes a worker longer ends the run, with the stacks of all ranks; of several optimizer steps in one
    call, each. So does an engine that runs so long without ending an answer."""


class RayClusterConfig(Section):
    """Ray: one machine or many."""

    type: Literal["ray"]
    ranks: PositiveInt | None = None
    """Processes of the one pool that all roles share, default 1; not together with `placement.pools`."""
    address: str | None = None
    """Where a cluster runs, as `ray.init` takes it; default: that of the environment, else a new local cluster."""
    timeout_s: PositiveFloat = 1800.0
    """A call that takes a worker longer ends the run, with the stacks of all ranks; of several optimizer steps in one
    call, each. So does an engine that runs so long without ending an answer."""


ClusterConfig = Annotated[
    Annotated[LocalClusterConfig, Tag("local")] | Annotated[RayClusterConfig, Tag("ray")], by_type("local")
]
RoleName = Literal["actor", "rollout", "critic", "reference", "teacher", "reward_model", "judge"]


class PlacementConfig(Section):
    """Which roles share processes. Roles on different pools work at the same time."""

    pools: dict[str, list[PositiveInt]] = {}
    """Processes on each node, by pool: `{main: [8, 8]}`. Default: one pool of `cluster.ranks`."""
    roles: dict[RoleName, str] = {}
    """The pool of each role; those left out are on the first pool."""

    def apart(self, one: RoleName, other: RoleName) -> bool:
        """The roles have different pools; one that is not named is in the first."""
        first = next(iter(self.pools), "")
        return self.roles.get(one, first) != self.roles.get(other, first)

    @rule()
    def _pools_exist(self) -> Iterator[str]:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                yield f"roles.{role}: pool {pool!r} is not in placement.pools ({', '.join(self.pools)})"

    @rule()
    def _pools_have_nodes(self) -> Iterator[str]:
        for name, nodes in self.pools.items():
            if not nodes:
                yield f"pools.{name}: has no node; give processes a node, as [8]"
