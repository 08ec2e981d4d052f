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
from ray.exceptions import RayError
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

    def __init__(self, pool: str, rank: int, size: int, local_rank: int) -> None:
        self._name = f"{pool} rank {rank}"
        self._local_rank = local_rank
        self._host = Host(rank, size, ray.util.get_node_ip_address())

    def __repr__(self) -> str:  # Ray puts it before each line that the process prints
        return self._name

    def describe(self) -> str:
        return str(self._host)

    def rendezvous(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, rendezvous: str, timeout_s: float) -> Packed | TandemError:
        return self._answer("joining the pool", lambda: self._host.join(rendezvous, self._local_rank, timeout_s))

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
        """Of every thread but this."""
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
        return "\n".join(f"thread {ident}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in frames)


_Actor: Any = ray.remote(concurrency_groups={"watch": 1})(_Process)  # pyright: ignore[reportCallIssue]


class RayRanks:
    """The actors of one pool."""

    def __init__(self, pool: ResourcePool, group: PlacementGroup, gpus: int, cluster: "RayCluster") -> None:
        self.size = pool.size
        self._name = pool.name
        self._group = group
        self._cluster = cluster
        places = [(node, local) for node, count in enumerate(pool.processes_on_nodes) for local in range(count)]
        self._actors = [
            _Actor.options(
                num_cpus=CPUS,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": _environment()},
            ).remote(pool.name, rank, pool.size, local_rank)
            for rank, (node, local_rank) in enumerate(places)
        ]
        self._ranks = [f"pool {pool.name}, rank {rank} of {pool.size}" for rank in range(pool.size)]

    def start(self) -> None:
        """Wait until all processes answer, joined in one torch.distributed world."""
        limit_s = self._cluster.start_timeout_s
        self._ranks = [f"pool {self._name}, {host}" for host in self._wait(self._ask("describe"), limit_s)]
        if self.size > 1:
            meeting = self._wait([self._actors[0].rendezvous.remote()], limit_s)[0]
            # twice: a call that hangs ends by the cluster's time-out, with all stacks, before its collective does
            self._wait(self._ask("join", meeting, 2 * self._cluster.timeout_s), limit_s)

    def create(self, role: str, kind: type[Worker], arguments: Arguments) -> dict[str, Mesh]:
        return _unpack(self._wait(self._ask("create", role, ray.put(_pack((kind, arguments)))))[0])

    def submit(self, role: str, method: str, calls: Calls) -> Future[list[Any]]:
        sent: dict[tuple[int, int], ObjectRef] = {}
        answers: list[ObjectRef | None] = [None] * self.size
        for rank, call in enumerate(calls):
            if call is not None:
                same = id(call.args), id(call.kwargs)
                if same not in sent:
                    sent[same] = ray.put(_pack((call.args, call.kwargs)))
                answers[rank] = self._actors[rank].call.remote(role, method, sent[same], call.rows)
        return Future(lambda: [None if answer is None else _unpack(answer) for answer in self._wait(answers)])

    def _ask(self, method: str, *arguments: Any) -> list[ObjectRef]:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors]

    def _wait(self, references: Sequence[ObjectRef | None], limit_s: float | None = None) -> list[Any]:
        """The answers, None for None. Between polls, every process of the cluster is seen to be alive."""
        answers: dict[ObjectRef | None, Any] = {None: None}
        pending = [reference for reference in references if reference is not None]
        limit_s = limit_s or self._cluster.timeout_s
        deadline = time.monotonic() + limit_s
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            answers |= zip(ready, self._answers(ready), strict=True)
            if pending:
                self._cluster.check()
                if time.monotonic() > deadline:
                    raise self._hung(limit_s)
        return [answers[reference] for reference in references]

    def _answers(self, ready: list[ObjectRef]) -> list[Any]:
        """Raises what a worker raised, but WorkerLost when a process is dead: then the others' collectives break."""
        try:
            answers = ray.get(ready)
        except RayError as error:
            self._cluster.check()
            raise WorkerLost(f"pool {self._name}: {error}") from None
        for answer in answers:
            if isinstance(answer, TandemError):
                self._cluster.check()
                raise answer
        return answers

    def check(self) -> None:
        """WorkerLost when a process is dead; one that is too busy to answer is not."""
        pings = self._ask("ping")
        ready, _ = ray.wait(pings, num_returns=self.size, timeout=PATIENCE_S)
        for rank, ping in zip(self._ranks, pings, strict=True):
            try:
                ray.get(ping) if ping in ready else None
            except RayError as error:
                raise WorkerLost(f"{rank}: the process died\n{error}") from None

    def _hung(self, limit_s: float) -> WorkerLost:
        asked = self._ask("stacks")
        ready, _ = ray.wait(asked, num_returns=self.size, timeout=PATIENCE_S)
        stacks = [ray.get(reference) if reference in ready else "no answer" for reference in asked]
        told = "\n".join(f"{rank}:\n{stack}" for rank, stack in zip(self._ranks, stacks, strict=True))
        return WorkerLost(f"pool {self._name}: no answer in {limit_s:g} s; the ranks are at\n{told}")

    def close(self) -> None:
        self._cluster.spawned.pop(self, None)
        ray.wait(self._ask("close"), num_returns=self.size, timeout=PATIENCE_S)
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
            address = address or os.environ.get("RAY_ADDRESS")
            ray_constants.ENABLE_RAY_CLUSTER = (
                address is not None
            )  # Ray's switch to stay on loopback: it has no argument
            ray.init(address or "local", include_dashboard=False, logging_level=logging.ERROR)

    def spawn(self, pool: ResourcePool) -> RayRanks:
        """Waits up to `start_timeout_s` for nodes that hold the pool, such as one that replaces a lost one."""
        gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        ranks = RayRanks(pool, self._place(pool, gpus), gpus, self)
        self.spawned[ranks] = None
        ranks.start()
        return ranks

    def _place(self, pool: ResourcePool, gpus: int) -> PlacementGroup:
        bundles = [{"CPU": count * CPUS, **({"GPU": count} if gpus else {})} for count in pool.processes_on_nodes]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if group.wait(min(PATIENCE_S, self.start_timeout_s)):
            return group
        nodes = [f"{node['NodeManagerHostname']} {node['Resources']}" for node in ray.nodes() if node["Alive"]]
        wanted = f"pool {pool.name}: there is no room for {bundles}, each on a node of its own, on {'; '.join(nodes)}"
        print(f"{wanted}; waiting for it", flush=True)
        if not group.wait(self.start_timeout_s):
            remove_placement_group(group)
            raise UserError(f"{wanted}, since {self.start_timeout_s:g} s; add nodes, or change placement.pools")
        return group

    def check(self) -> None:
        """WorkerLost when a process of any pool is dead."""
        for ranks in self.spawned:
            ranks.check()

    def close(self) -> None:
        for ranks in list(self.spawned):
            ranks.close()
        if self._connected:
            ray.shutdown()


def _environment() -> dict[str, str]:
    """What the processes get of the controller's environment; no progress bars in their output."""
    return {"TQDM_DISABLE": "1"} | {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
