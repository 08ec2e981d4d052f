"""Ray: the processes of a pool are actors in a placement group. The only file that imports Ray.

    controller --arguments, put once--> object store --zero-copy--> actor, which takes its rows --> WorkerHost.call
               <------ Future <-------- object store <----------------- answer -------------------------

A second thread of each actor reports the stack of the first one, and with it that the process is alive.
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, TypeVar

import psutil
import ray
from ray import ObjectRef, cloudpickle
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.controller.groups import Future
from tandem.controller.pools import ResourcePool
from tandem.errors import TandemError, UserError, WorkerError, WorkerLost
from tandem.signals import leave_stopping_to_the_controller
from tandem.types import IntArray
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Arguments, Calls, Mesh

Spec = TypeVar("Spec")
_COLLECTIVE_S = 7 * 86_400.0  # of torch.distributed; the cluster's own time-out ends a call that hangs, with all stacks
_CPUS = 0.01  # that a process reserves: the pool says how many share a node, not Ray
_OUT_OF_BAND_BYTES = 1 << 14  # smaller arrays are copied into the pickle
_PATIENCE_S = 8.0  # for a process to tell its stacks, and for its workers to close
_POLL_S = 1.0  # between two looks at whether all processes are alive, while a call runs
_FORWARDED = (
    "CUBLAS_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "OMP_",
    "RAY_DEBUG",
    "SGLANG_",
    "TANDEM_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "VLLM_",
)
"""Environment variables whose names start so are the controller's in its processes, too."""
_Packed = tuple[bytes, list[Any]]  # a pickle and its large buffers, which Ray passes without copying


def _pack(value: Any) -> _Packed:
    buffers: list[PickleBuffer] = []

    def keep_in_band(buffer: PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= _OUT_OF_BAND_BYTES
        if large:
            buffers.append(buffer)
        return not large

    return cloudpickle.dumps(value, buffer_callback=keep_in_band), buffers  # pyright: ignore[reportPrivateImportUsage]


def _unpack(packed: _Packed, own: bool = True) -> Any:
    """`own`: arrays are copied out of the object store, where they could only be read."""
    data, buffers = packed
    return cloudpickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers] if own else buffers)


class _Process:
    """What an actor is: a WorkerHost."""

    def __init__(self, pool: ResourcePool, rank: int, local_rank: int) -> None:
        leave_stopping_to_the_controller()
        self._pool, self._rank, self._local_rank = pool, rank, local_rank
        self._address = ray.util.get_node_ip_address()
        self._host = WorkerHost(rank, pool.size, self._address)
        for name, addresses in psutil.net_if_addrs().items():  # gloo would go by what the host's name stands for
            if any(address.address == self._address for address in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def __repr__(self) -> str:  # Ray puts it before each line that the process prints
        return f"{self._pool.name} rank {self._rank}"

    def rendezvous(self) -> str:
        if len(self._pool.processes_on_nodes) == 1:
            return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('tandem')}"
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{self._address}:{free.getsockname()[1]}"

    def join(self, rendezvous: str) -> str:
        if self._pool.size > 1:
            self._host.join(rendezvous, self._local_rank, _COLLECTIVE_S)
        return f"pool {self._pool.name}, {self._host}"

    def create(self, name: str, packed: _Packed) -> _Packed | TandemError:
        return self._guarded(name, lambda: self._host.create(name, *_unpack(packed)))

    def perform(self, name: str, packed: _Packed, rows: IntArray | None) -> _Packed | TandemError:
        def call() -> Any:
            method, args, kwargs = _unpack(packed, own=rows is None)
            return self._host.call(name, method, Arguments(args, kwargs, rows))

        return self._guarded(name, call)

    def _guarded(self, name: str, work: Callable[[], Any]) -> _Packed | TandemError:
        """What `work` returns, or the error that it raised, for the controller to raise."""
        try:
            return _pack(work())
        except TandemError as error:
            return error
        except Exception:  # noqa: BLE001  whatever it is
            return WorkerError(f"{name}, {self._host}:\n{traceback.format_exc()}")

    def close(self) -> None:
        self._host.close()

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The stacks of every thread but this."""
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
        return "\n".join(f"thread {ident}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in frames)


_Actor: Any = ray.remote(concurrency_groups={"watch": 1})(_Process)  # pyright: ignore[reportCallIssue]


class RayRanks:
    """The actors of one pool."""

    def __init__(self, pool: ResourcePool, group: PlacementGroup, gpus: int, cluster: "RayCluster") -> None:
        self.size = pool.size
        self._pool = pool
        self._group = group
        self._cluster = cluster
        environment = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TQDM_DISABLE": "1"}
        places = [(node, local) for node, count in enumerate(pool.processes_on_nodes) for local in range(count)]
        self._actors = [
            _Actor.options(
                num_cpus=_CPUS,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": environment},
            ).remote(pool, rank, local_rank)
            for rank, (node, local_rank) in enumerate(places)
        ]
        self._ranks = [f"pool {pool.name}, rank {rank} of {pool.size}" for rank in range(pool.size)]

    def start(self) -> None:
        """Wait until all processes answer, joined in one torch.distributed world."""
        [meeting] = self._wait([self._actors[0].rendezvous.remote()], self._cluster.start_timeout_s)
        self._ranks = self._wait(self._call_actors("join", meeting), self._cluster.start_timeout_s)

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        return _unpack(self._wait(self._call_actors("create", name, ray.put(_pack((kind, spec)))))[0])

    def submit(self, name: str, method: str, calls: Calls) -> Future[list[Any]]:
        put: dict[tuple[int, int], ObjectRef] = {}
        pending: dict[int, ObjectRef] = {}
        for rank, call in enumerate(calls):
            if call is not None:
                shared = id(call.args), id(call.kwargs)
                if shared not in put:
                    put[shared] = ray.put(_pack((method, call.args, call.kwargs)))
                pending[rank] = self._actors[rank].perform.remote(name, put[shared], call.rows)

        def wait() -> list[Any]:
            answers = dict(zip(pending, self._wait(list(pending.values())), strict=True))
            return [_unpack(answers[rank]) if rank in answers else None for rank in range(self.size)]

        return Future(wait)

    def _call_actors(self, method: str, *arguments: Any) -> list[ObjectRef]:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors]

    def _wait(self, references: list[ObjectRef], limit_s: float | None = None) -> list[Any]:
        """The answers. A failure ends all pools; its cause is a dead process, if any, as that breaks collectives."""
        try:
            return self._collect(references, limit_s or self._cluster.timeout_s)
        except (TandemError, RayError) as error:
            try:
                if not isinstance(error, WorkerLost):
                    self._cluster.stacks()
            finally:
                self._cluster.end(patience_s=0.0)
            if isinstance(error, TandemError):
                raise
            raise WorkerLost(f"pool {self._pool.name}: {error}") from None

    def _collect(self, references: list[ObjectRef], limit_s: float) -> list[Any]:
        deadline = time.monotonic() + limit_s
        answers: dict[ObjectRef, Any] = {}
        while pending := [reference for reference in references if reference not in answers]:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
            for reference, answer in zip(ready, ray.get(ready), strict=True):
                if isinstance(answer, TandemError):
                    raise answer
                answers[reference] = answer
            stacks = self._cluster.stacks() if pending else ""
            if pending and time.monotonic() > deadline:
                raise WorkerLost(f"pool {self._pool.name}: no answer in {limit_s:g} s; all processes are at\n{stacks}")
        return [answers[reference] for reference in references]

    def stacks(self) -> str:
        """The stacks of each process; WorkerLost when one is dead."""
        references = self._call_actors("stacks")
        ready, _ = ray.wait(references, num_returns=self.size, timeout=_PATIENCE_S)
        stacks = ""
        for rank, reference in zip(self._ranks, references, strict=True):
            try:
                stacks += f"{rank}:\n{ray.get(reference) if reference in ready else 'too busy to answer'}\n"
            except RayError as error:
                raise WorkerLost(f"{rank}: the process died\n{error}") from None
        return stacks

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        if self in self._cluster.spawned:
            self._cluster.spawned.remove(self)
            ray.wait(self._call_actors("close"), num_returns=self.size, timeout=patience_s)
            for actor in self._actors:
                ray.kill(actor)
            remove_placement_group(self._group)


class RayCluster:
    """Pools on the Ray cluster at `address`, else at RAY_ADDRESS, else on one that is started on this machine.

    A failure in one pool ends them all; `spawn` starts anew. A program that called `ray.init` stays connected as it is.
    """

    def __init__(self, address: str | None = None, timeout_s: float = 1800.0, start_timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.spawned: list[RayRanks] = []
        self._connected = not ray.is_initialized()
        if self._connected:
            address = address or os.environ.get("RAY_ADDRESS")
            ray_constants.ENABLE_RAY_CLUSTER = address is not None  # Ray's own switch: False stays on loopback
            ray.init(address or "local", include_dashboard=False, logging_level=logging.ERROR)

    def spawn(self, pool: ResourcePool) -> RayRanks:
        """Waits up to `start_timeout_s` for nodes that hold the pool, such as one that replaces a lost one."""
        gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        ranks = RayRanks(pool, self._place(pool, gpus), gpus, self)
        self.spawned.append(ranks)
        ranks.start()
        return ranks

    def _place(self, pool: ResourcePool, gpus: int) -> PlacementGroup:
        bundles = [{"CPU": count * _CPUS, "GPU": count * gpus} for count in pool.processes_on_nodes]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(min(_PATIENCE_S, self.start_timeout_s)):
            nodes = [(n["NodeManagerHostname"], n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]]
            wanted = f"pool {pool.name}: {pool.processes_on_nodes} processes, each number on a node of its own"
            wanted += f", find no room on Ray's nodes, which have GPUs: {nodes}"
            print(f"{wanted}; waiting", flush=True)
            if not group.wait(self.start_timeout_s):
                remove_placement_group(group)
                raise UserError(f"{wanted}, for {self.start_timeout_s:g} s; add nodes, or change placement.pools")
        return group

    def stacks(self) -> str:
        """The stacks of all processes; WorkerLost when one is dead."""
        return "".join([ranks.stacks() for ranks in self.spawned])

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        for ranks in list(self.spawned):
            ranks.close(patience_s)

    def close(self) -> None:
        self.end()
        if self._connected:
            ray.shutdown()
