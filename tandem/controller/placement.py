"""Where the workers of each role run: the pools of the configuration, started when their first role is made."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from tandem.config.tree import ModelsConfig, RolloutConfig
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.worker_groups import Cluster, EventSource, Ranks, RemoteWorkers
from tandem.types import StepMetrics
from tandem.workers.host import Worker

Group = TypeVar("Group", bound=RemoteWorkers[Any])
Spec = TypeVar("Spec")


class Placement:
    """Starts each pool at its first role, and puts every further role of the pool into the same processes."""

    def __init__(
        self, cluster: Cluster, pools: ResourcePoolManager, kinds: Mapping[Role, type[Worker[Any]]] | None = None
    ) -> None:
        """`kinds`: the user's own worker classes, by role."""
        self._cluster = cluster
        self._pools = pools
        self._kinds = kinds or {}
        self._running: dict[str, Ranks] = {}
        self._one_of_each_pool: list[RemoteWorkers[Any]] = []
        self._peaks: list[list[StepMetrics]] = []
        """What each pool's processes have last said of their memory."""

    def group(
        self, role: Role, group: type[Group], kind: type[Worker[Spec]], spec: Spec, name: str | None = None
    ) -> Group:
        """A worker on every rank of the role's pool, and the group of them.

        A role that uses another role's worker in the same process, as the rollout uses the actor's, is made after it.
        `name` is the worker's, by default that of its role; two workers of one role in a process need different names.
        """
        pool = self._pools.get_resource_pool(role)
        new_pool = pool.name not in self._running
        if new_pool:
            self._running[pool.name] = self._cluster.spawn(pool)
        made = group(self._running[pool.name], name or role, self._kinds.get(role, kind), spec)
        if new_pool:
            self._one_of_each_pool.append(made)
        return made

    def size(self, role: Role) -> int:
        """Ranks of the role's pool."""
        return self._pools.get_resource_pool(role).size

    def together(self, *roles: Role) -> bool:
        """The roles share their processes."""
        return len({self._pools.get_resource_pool(role).name for role in roles}) == 1

    def has_own_kind(self, role: Role) -> bool:
        """The user has a worker class of their own for the role."""
        return role in self._kinds

    @property
    def sources(self) -> list[EventSource]:
        """What the controller waits for besides the ranks: `Cluster.sources`."""
        return self._cluster.sources

    def watch(self, timeout_s: float | None = None) -> None:
        """Wait a moment for anything that is under way: `Cluster.watch`."""
        self._cluster.watch(timeout_s)

    def costs(self, tokens: float, seconds: float) -> StepMetrics:
        """The time and throughput of a step, and the highest peak memory of any process so far.

        Nothing waits for pools that may be busy: all but the first one, which trains, are as they were a step before.
        """
        asked = [group.peak_memory() for group in self._one_of_each_pool]
        if len(asked) > len(self._peaks):
            self._peaks = [memory.get() for memory in asked]
        self._peaks[0] = asked[0].get()
        for pool, memory in enumerate(asked[1:], 1):
            memory.then(partial(self._peaks.__setitem__, pool))
        peaks = [peak for pool in self._peaks for peak in pool]
        return {
            "time/step_s": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_gpu": tokens / seconds / len(peaks),
            **{name: max(peak.get(name, 0.0) for peak in peaks) for one in peaks for name in one},
        }

    def close(self) -> None:
        """End the processes of all pools."""
        for ranks in self._running.values():
            ranks.close()


def pools_of(config: ModelsConfig) -> ResourcePoolManager:
    """The pools of `placement`, by default one of `cluster.ranks` for every role."""
    if not isinstance(config, RolloutConfig) or not config.placement.pools:
        return ResourcePoolManager({"main": [config.cluster.ranks or 1]}, dict.fromkeys(Role, "main"))
    first_pool = next(iter(config.placement.pools))
    placed = {Role(name): pool for name, pool in config.placement.roles.items()}
    mapping = {role: placed.get(role, first_pool) for role in Role if len(role.parts) == 1}
    return ResourcePoolManager(config.placement.pools, mapping)
