"""What a step's record says of the machine."""

from __future__ import annotations

import pytest

from tandem.controller.placement import Placement
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.worker_groups import Cluster, WorkerGroup
from tandem.simulation.virtual import Timed, VirtualCluster
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, register

PEAK = "perf/peak_memory_gib"


class Busy(Worker[float]):
    """Its peak grows with every call; `work` takes long."""

    @register(Dispatch.ALL, mesh="ranks")
    def peak_memory(self) -> Timed:  # type: ignore[override]
        self.spec += 1.0
        peak = self.spec
        return Timed(0.0, lambda: {PEAK: peak})

    @register(Dispatch.REPLICATED)
    def work(self) -> Timed:
        return Timed(100.0, lambda: None)


@pytest.fixture
def cluster() -> VirtualCluster:
    return VirtualCluster()


def test_a_step_does_not_wait_for_the_memory_of_a_pool_that_generates(cluster: VirtualCluster) -> None:
    on: Cluster = cluster
    pools = ResourcePoolManager({"a": [1], "b": [2]}, {Role.Actor: "a", Role.Rollout: "b"})
    placement = Placement(on, pools)
    placement.group(Role.Actor, WorkerGroup, Busy, 0.0)
    rollout = placement.group(Role.Rollout, WorkerGroup, Busy, 10.0)
    first = placement.costs(tokens=30.0, seconds=2.0)
    assert first == {"time/step_s": 2.0, "perf/tokens_per_s": 15.0, "perf/tokens_per_s_per_gpu": 5.0, PEAK: 11.0}
    working = rollout.work()
    assert placement.costs(30.0, 2.0)[PEAK] == 11.0 and cluster.now == 0.0, "as it was a step before"
    working.get()
    placement.costs(30.0, 2.0)
    assert placement.costs(30.0, 2.0)[PEAK] > 11.0 and cluster.now == 100.0
