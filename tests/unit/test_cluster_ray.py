"""Pools on Ray's nodes: two real ones on this machine, and the cluster that Tandem starts itself."""

import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from tandem.cluster.ray import RayCluster
from tandem.cluster.ray_connection import first_listening
from tandem.controller.placed import Placed
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import WorkerGroup
from tandem.errors import UserError, WorkerLost
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, register
from tests.cluster_workers import Probe as Rows
from tests.cluster_workers import ragged_batch

OVER_BOTH = ResourcePool("main", (1, 1))


class Probe(Worker):
    """Tells where it is."""

    @register(Dispatch.ALL)
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    @register(Dispatch.ALL)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(Dispatch.ALL)
    def sum(self, value: float) -> float:
        total = torch.tensor(value * (self.context.rank + 1))
        torch.distributed.all_reduce(total)
        return total.item()

    @register(Dispatch.ALL)
    def sum_for_ever(self) -> None:
        while True:
            self.sum(1.0)

    @register(Dispatch.ALL)
    def sum_without_rank_zero(self) -> None:
        if self.context.rank == 0:
            time.sleep(3600)
        self.sum(1.0)


def test_a_pool_over_two_nodes_is_one_world_and_calls_reach_both(
    ray_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's own over a channel, the other through Ray; the time-out is that of each optimizer step."""
    monkeypatch.setenv("TANDEM_TEST", "forwarded")
    cluster = RayCluster()
    ranks = cluster.spawn(OVER_BOTH)
    probes = WorkerGroup(ranks, "probe", Probe)
    assert sorted(probes.node().get()) == sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    assert probes.sum(10.0).get() == [30.0, 30.0]
    assert probes.environment("TANDEM_TEST").get() == ["forwarded", "forwarded"]
    assert len(ranks.channels) == 1
    rows = WorkerGroup(ranks, "rows", Rows)
    cluster.timeout_s = 4.0  # after all that has to be loaded and connected
    batch = ragged_batch([1 + (997 * row) % 2048 for row in range(60)])
    expected = batch.row_of_token + batch.response_ids / 1000
    with Placed(batch) as placed:
        np.testing.assert_allclose(rows.score(placed.rows(fills=("values",))).get(), expected, rtol=1e-5)
        learned = rows.learn([placed.rows() for _ in range(4)], 3.5).get()
    for metrics, tokens in learned:
        assert metrics == {"rows": 60}
        np.testing.assert_allclose(tokens, 3.5 * expected, rtol=1e-5)
    cluster.close()


def test_a_pool_without_room_tells_what_there_is(ray_nodes: Cluster) -> None:
    cluster = RayCluster(start_timeout_s=0.5)
    with pytest.raises(UserError, match=r"pool wide: \(1, 1, 1\) processes, .* GPUs: \[\('\S+', 0\), \('\S+', 0\)\]"):
        cluster.spawn(ResourcePool("wide", (1, 1, 1)))
    cluster.close()


@pytest.mark.nightly
def test_a_call_that_hangs_ends_with_the_stacks_of_all_ranks(ray_nodes: Cluster) -> None:
    cluster = RayCluster()
    probes = WorkerGroup(cluster.spawn(OVER_BOTH), "probe", Probe)
    assert probes.sum(1.0).get() == [3.0, 3.0]
    cluster.timeout_s = 2.0  # after all that has to be loaded and connected
    with pytest.raises(WorkerLost) as error:
        probes.sum_without_rank_zero().get()
    for part in (
        "pool main: no answer in 2 s",
        "rank 0 of 2 on ",
        "time.sleep(3600)",
        "rank 1 of 2 on ",
        "all_reduce(",
    ):
        assert part in str(error.value)
    cluster.close()


@pytest.mark.nightly
def test_a_call_that_hangs_and_that_nobody_waits_for_ends_everything(ray_nodes: Cluster) -> None:
    cluster = RayCluster()
    probes = WorkerGroup(cluster.spawn(OVER_BOTH), "probe", Probe)
    others = WorkerGroup(cluster.spawn(ResourcePool("others", (1,))), "probe", Probe)
    assert (probes.sum(1.0).get(), len(others.node().get())) == ([3.0, 3.0], 1)
    cluster.timeout_s = 2.0
    probes.sum_without_rank_zero()
    with pytest.raises(WorkerLost, match=r"(?s)pool main: no answer in 2 s; .*all_reduce\("):
        while True:
            others.node().get()
    cluster.close()


@pytest.mark.nightly
def test_the_pool_of_a_dead_node_starts_again_when_another_node_comes(ray_nodes: Cluster) -> None:
    cluster = RayCluster(timeout_s=300.0)
    probes = WorkerGroup(cluster.spawn(OVER_BOTH), "probe", Probe)
    call = probes.sum_for_ever()
    ray_nodes.remove_node(next(iter(ray_nodes.worker_nodes)), allow_graceful=False)
    with pytest.raises(WorkerLost, match=r"pool main, rank \d of 2 on \S+ \(process \d+\): the process died"):
        call.get()
    with ThreadPoolExecutor() as threads:
        spawned = threads.submit(cluster.spawn, OVER_BOTH)
        ray_nodes.add_node(num_cpus=1)
        probes = WorkerGroup(spawned.result(), "probe", Probe)
    assert probes.sum(1.0).get() == [3.0, 3.0]
    cluster.close()


@pytest.mark.nightly
def test_a_ray_worker_group_is_made_of_ray_actors(ray_nodes: Cluster) -> None:
    from tandem.jobs.ray_trainer import RayWorkerGroup  # here: actors import this module, and shall not wait for it

    group = RayWorkerGroup(OVER_BOTH, Probe)
    assert sorted(group.node().get()) == sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    assert group.sum(10.0).get() == [30.0, 30.0]
    group.close()


OWN_CLUSTER = """
from tandem.cluster.ray import RayCluster
from tandem.controller.worker_groups import WorkerGroup
from tandem.controller.pools import ResourcePool
from tandem.errors import UserError
from tandem.workers.registration import Dispatch, register
from tandem.workers.host import Worker
import ray, select, sys, torch

here = ray.util.get_node_ip_address()

class Answer:
    value = 3

class Mine(Worker):
    @register(Dispatch.ALL)
    def answer(self):
        torch.distributed.barrier()
        print("spoken")
        return Answer()

cluster = RayCluster()
mine = WorkerGroup(cluster.spawn(ResourcePool("main", (2,))), "mine", Mine)
answers = mine.answer().get()
assert all(type(answer) is Answer for answer in answers)
token = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
sys.stdout.write(f"told {token}\\n")  # in one piece: Ray writes what ranks print between the pieces of a print
sys.stdout.flush()
while not select.select([sys.stdin], [], [], 0.5)[0]:
    mine.answer().get()  # again: Ray may lose what is printed while a cluster is new
cluster.close()
assert ray.util.get_node_ip_address() == here  # a cluster that this process starts now is within others' reach
try:
    RayCluster("127.0.0.1:1", start_timeout_s=0.1)
except UserError as error:
    print(error)
"""


def test_the_cluster_that_tandem_starts_stays_on_loopback(tmp_path: Path) -> None:
    """It asks for a token, too; takes worker classes of `__main__`, and forwards what they print. Then: nobody at an
    address."""
    script = tmp_path / "script.py"
    script.write_text(OWN_CLUSTER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Popen([sys.executable, str(script)], stdin=PIPE, stdout=PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        stop = Timer(300, process.kill)  # which ends the lines
        stop.start()
        printed: list[str] = []
        for line in process.stdout:
            printed.append(line)
            if all(any(word in line for line in printed) for word in ("spoken", "told")):
                break
        stop.cancel()
        assert any("(main rank " in line for line in printed)  # of lines that ranks have in common, Ray shows one
        assert "told True\n" in printed
        addresses = listening(process.pid)
        end = process.communicate("\n", timeout=120)[0]
    assert len(addresses) >= 5
    assert set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert process.returncode == 0
    assert re.search(r"cluster.address or RAY_ADDRESS: no Ray at \S+:1 .*refused\); waiting\n", end)
    assert re.search(r"no Ray at \S+:1 .*refused\) for 0.1 s; `ray start --head --port=1` starts one there\n", end)


@pytest.mark.parametrize(("host", "bound"), [("[::1]", "::1"), ("::1", "::1"), ("127.0.0.1", "127.0.0.1")])
def test_an_address_of_either_kind_of_ip_is_waited_for(host: str, bound: str) -> None:
    with socket.create_server((bound, 0), family=socket.AF_INET6 if ":" in bound else socket.AF_INET) as server:
        assert first_listening(["nowhere.invalid", host], server.getsockname()[1], 0) == host


def listening(root: int) -> list[str]:
    """Addresses at which a process and its descendants listen."""
    import psutil  # which Ray brings

    processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("tcp")]
    return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
