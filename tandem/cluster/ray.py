"""Ray: the processes of a pool are actors in a placement group. The only file that imports Ray.

    controller --arguments, put once--> object store --zero-copy--> actor, which takes its rows --> Host.call
               <------ Future <-------- object store <----------------- answer -------------------------

Actors serve one call at a time, in order; a second thread of theirs answers `ping` and `stacks` meanwhile.
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.controller.groups import Future
from tandem.controller.pools import ResourcePool
from tandem.errors import TandemError, UserError, WorkerError, WorkerLost
from tandem.types import IntArray
from tandem.workers.dispatch import Arguments, Calls, Mesh
from tandem.workers.host import Host, Worker

CPUS = 0.01
"""That a process reserves: how many share a machine is said by the pool, not by Ray."""
FORWARDED = ("CUBLAS_", "CUDA_LAUNCH_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHONPATH", "TANDEM_", "TOKENIZERS_")
FORWARDED += ("TORCH", "TRANSFORMERS_", "VLLM_")
"""The controller's environment variables whose names start so are those of its processes, too."""
OUT_OF_BAND_BYTES = 1 << 16
"""Larger arrays are not copied into the pickle."""
POLL_S = 1.0
"""Between two looks at whether all processes are alive, while a call runs."""
PATIENCE_S = 4.0
"""For a process to answer `ping` and `stacks`, and for its workers to close."""

Packed = tuple[bytes, list[Any]]
"""A pickle and its large buffers, which Ray passes without copying."""


def _pack(value: Any) -> Packed:
    buffers: list[PickleBuffer] = []

    def keep_in_band(buffer: PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= OUT_OF_BAND_BYTES
        if large:
            buffers.append(buffer)
        return not large

    data = cloudpickle.dumps(value, protocol=5, buffer_callback=keep_in_band)  # pyright: ignore[reportPrivateImportUsage]
    return data, buffers


def _unpack(packed: Packed, own: bool = True) -> Any:
    """`own`: arrays are copied out of the object store, where they could only be read."""
    data, buffers = packed
    return cloudpickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers] if own else buffers)


class _Process:
    """What an actor is: a Host."""

    def __init__(self, pool: str, rank: int, size: int) -> None:
        self._pool, self._rank = pool, rank
        self._host = Host(rank, size, ray.util.get_node_ip_address())

    def __repr__(self) -> str:  # Ray puts it before each line that the process prints
        return f"{self._pool} rank {self._rank}"

    def describe(self) -> str:
        return str(self._host)

    def rendezvous(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, rendezvous: str, local_rank: int, timeout_s: float) -> Packed | TandemError:
        return self._answer("joining the pool", lambda: self._host.join(rendezvous, local_rank, timeout_s))

    def create(self, role: str, packed: Packed) -> Packed | TandemError:
        return self._answer(role, lambda: self._host.create(role, *_unpack(packed)))

    def call(self, role: str, method: str, packed: Packed, rows: IntArray | None) -> Packed | TandemError:
        def call() -> Any:
            args, kwargs = _unpack(packed, own=rows is None)
            return self._host.call(role, method, Arguments(args, kwargs, rows))

        return self._answer(role, call)

    def _answer(self, role: str, work: Callable[[], Any]) -> Packed | TandemError:
        try:
            return _pack(work())
        except TandemError as error:
            return error
        except Exception:  # noqa: BLE001  the controller raises it
            return WorkerError(f"{role}, {self._host}:\n{traceback.format_exc()}")

    def close(self) -> None:
        self._host.close()

    @ray.method(concurrency_group="watch")
    def ping(self) -> None: ...

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The Python stack of every thread but this."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in others
        )


_Actor: Any = ray.remote(concurrency_groups={"watch": 1})(_Process)  # pyright: ignore[reportCallIssue]


class RayRanks:
    """The actors of one pool."""

    def __init__(self, pool: ResourcePool, group: PlacementGroup, gpus: int, cluster: "RayCluster") -> None:
        self.size = pool.size
        self._pool = pool
        self._group = group
        self._cluster = cluster
        environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self._actors = [
            _Actor.options(
                num_cpus=CPUS,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": environment},
            ).remote(pool.name, rank, pool.size)
            for rank, node in enumerate(self._nodes())
        ]
        self._names = [f"rank {rank} of {pool.size}" for rank in range(pool.size)]

    def _nodes(self) -> list[int]:
        """The node of each rank, as a number of the placement group's bundle."""
        return [node for node, processes in enumerate(self._pool.processes_on_nodes) for _ in range(processes)]

    def start(self) -> None:
        """Wait until all processes answer, joined in one torch.distributed world."""
        limit_s = self._cluster.start_timeout_s
        self._names = self._wait([actor.describe.remote() for actor in self._actors], limit_s)
        if self.size > 1:
            meeting = self._wait([self._actors[0].rendezvous.remote()], limit_s)[0]
            local_ranks = [rank for processes in self._pool.processes_on_nodes for rank in range(processes)]
            # a call that hangs ends by this cluster's time-out, with all stacks, before its collective does
            collective_s = 2 * self._cluster.timeout_s
            joining = [
                actor.join.remote(meeting, local_rank, collective_s)
                for actor, local_rank in zip(self._actors, local_ranks, strict=True)
            ]
            self._wait(joining, limit_s)

    def create(self, role: str, kind: type[Worker], arguments: Arguments) -> dict[str, Mesh]:
        packed = ray.put(_pack((kind, arguments)))
        return _unpack(self._wait([actor.create.remote(role, packed) for actor in self._actors])[0])

    def submit(self, role: str, method: str, calls: Calls) -> Future[list[Any]]:
        packed: dict[tuple[int, int], ObjectRef] = {}
        answers: list[ObjectRef | None] = []
        for actor, call in zip(self._actors, calls, strict=True):
            if call is None:
                answers.append(None)
                continue
            same = id(call.args), id(call.kwargs)
            if same not in packed:
                packed[same] = ray.put(_pack((call.args, call.kwargs)))
            answers.append(actor.call.remote(role, method, packed[same], call.rows))
        return Future(lambda: [None if answer is None else _unpack(answer) for answer in self._wait(answers)])

    def _wait(self, references: Sequence[ObjectRef | None], limit_s: float | None = None) -> list[Any]:
        """The answers, None for None. Between polls, every process of the cluster is seen to be alive."""
        answers: dict[ObjectRef | None, Any] = {None: None}
        pending = [reference for reference in references if reference is not None]
        limit_s = limit_s or self._cluster.timeout_s
        deadline = time.monotonic() + limit_s
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            try:
                answers |= zip(ready, ray.get(ready), strict=True)
            except RayError as error:
                self._cluster.check()
                raise WorkerLost(f"pool {self._pool.name}: {error}") from None
            for answer in answers.values():
                if isinstance(answer, TandemError):
                    self._cluster.check()  # when a process dies, the others raise, as their collectives break
                    raise answer
            if pending:
                self._cluster.check()
                if time.monotonic() > deadline:
                    raise self._hung(limit_s)
        return [answers[reference] for reference in references]

    def check(self) -> None:
        """WorkerLost when a process is dead; one that is too busy to answer is not."""
        pings = [actor.ping.remote() for actor in self._actors]
        ready, _ = ray.wait(pings, num_returns=len(pings), timeout=PATIENCE_S)
        for name, ping in zip(self._names, pings, strict=True):
            try:
                ray.get(ping) if ping in ready else None
            except RayActorError as error:
                raise WorkerLost(f"pool {self._pool.name}, {name}: the process died\n{error}") from None

    def _hung(self, limit_s: float) -> WorkerLost:
        references = [actor.stacks.remote() for actor in self._actors]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=PATIENCE_S)
        stacks = [ray.get(reference) if reference in ready else "no answer" for reference in references]
        told = "\n".join(f"{name}:\n{stack}" for name, stack in zip(self._names, stacks, strict=True))
        return WorkerLost(f"pool {self._pool.name}: no answer in {limit_s} s; its ranks are at\n{told}")

    def close(self) -> None:
        self._cluster.spawned.pop(self, None)
        ray.wait([actor.close.remote() for actor in self._actors], num_returns=self.size, timeout=PATIENCE_S)
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


class RayCluster:
    """Pools on the Ray cluster at `address`, else at RAY_ADDRESS, else on one that is started on this machine.

    A program that has called `ray.init` itself stays connected as it is.
    """

    def __init__(self, address: str | None = None, timeout_s: float = 1800.0, start_timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.spawned: dict[RayRanks, None] = {}
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(address or os.environ.get("RAY_ADDRESS"))

    def spawn(self, pool: ResourcePool) -> RayRanks:
        """Waits up to `start_timeout_s` for nodes that hold the pool, such as one that replaces a lost one."""
        gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        ranks = RayRanks(pool, self._place(pool, gpus), gpus, self)
        self.spawned[ranks] = None
        ranks.start()
        return ranks

    def _place(self, pool: ResourcePool, gpus: int) -> PlacementGroup:
        bundles = [{"CPU": count * CPUS, **({"GPU": count} if gpus else {})} for count in pool.processes_on_nodes]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        if group.wait(min(PATIENCE_S, self.start_timeout_s)):
            return group
        nodes = [
            f"{node['NodeManagerHostname']}: {node['Resources'].get('GPU', 0):g} GPUs"
            for node in ray.nodes()
            if node["Alive"]
        ]
        wanted = (
            f"pool {pool.name}: {list(pool.processes_on_nodes)} processes, one number a node" + ", a GPU each" * gpus
        )
        print(f"{wanted}: waiting for room on Ray's nodes, which are {', '.join(nodes)}", flush=True)
        if group.wait(self.start_timeout_s):
            return group
        remove_placement_group(group)
        raise UserError(
            f"{wanted}, found no room for {self.start_timeout_s:g} s on Ray's nodes, which are {', '.join(nodes)}; "
            "add nodes, or change placement.pools"
        )

    def check(self) -> None:
        """WorkerLost when a process of any pool is dead."""
        for ranks in self.spawned:
            ranks.check()

    def close(self) -> None:
        for ranks in list(self.spawned):
            ranks.close()
        if self._connected:
            ray.shutdown()


def _connect(address: str | None) -> None:
    if address is not None:
        ray.init(address, logging_level=logging.ERROR)
        return
    may_leave_machine = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray's own switch for a cluster on loopback, which it has no argument for
    try:
        ray.init("local", include_dashboard=False, logging_level=logging.ERROR)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_leave_machine
