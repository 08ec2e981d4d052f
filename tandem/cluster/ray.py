"""Ray: the processes of a pool are actors in a placement group. `ray_actor.py` is their side.

    controller --each group's arguments--> object store --fetched by its node, zero-copy--> actor --> WorkerHost.call
               <-------- Future <--------- object store <------------------ answer ------------------
               <--- channel: pipes and shared memory (`rank_rpc.py`) ---> actors on its node, in one call, `serve`

A call of an actor takes Ray milliseconds, and so does an object of some megabytes: an actor that can open the
controller's files is told of calls through them. A second thread of each actor reports the stack of the first one, and
with it that the process is alive. All answers are taken in by `RayCluster.watch`.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Pipe, wait
from typing import Any, NoReturn, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.events import Events, PendingCall
from tandem.cluster.process import keep_freed_memory
from tandem.cluster.rank_rpc import CallRequest, CreateRequest, RankClient
from tandem.cluster.ray_actor import Actor, Ends, dumps, pack, put, unpack
from tandem.cluster.ray_connection import connect
from tandem.cluster.shared_memory import Arena, SharedFile, View
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import EventSource, Future
from tandem.errors import TandemError, UserError, WorkerLost
from tandem.workers.host import Worker
from tandem.workers.registration import Calls, Mesh

Spec = TypeVar("Spec")
_CPUS = 0.01  # that a process reserves: the pool says how many share a node, not Ray
_PATIENCE_S = 8.0  # for a process to tell its stacks, and for its workers to close
_LISTENS_S = 60.0  # for a cluster at an address to take connections
_LOOK_S = 1.0  # between two looks at whether all processes are alive, while a call runs
_POLL_S = 0.02  # between two looks at the sources, for which Ray cannot wait
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


class _Pending(PendingCall):
    """A call of which each rank may begin at most `limit_s` ago."""

    def __init__(self, ranks: Iterable[int], limit_s: float) -> None:
        super().__init__(ranks)
        self.limit_s = limit_s


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
            Actor.options(
                num_cpus=_CPUS,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": environment},
            ).remote(pool, rank, local_rank)
            for rank, (node, local_rank) in enumerate(places)
        ]
        self._ranks = [f"pool {pool.name}, rank {rank} of {pool.size}" for rank in range(pool.size)]
        self.channels: dict[int, RankClient] = {}
        """By rank: those of the actors on the controller's node."""
        self._requests_file = SharedFile()
        self._requests = Arena(self._requests_file, dumps)
        self.pending: list[dict[ObjectRef, _Pending]] = [{} for _ in self._actors]
        """The calls of each rank that has no channel; it does the first."""
        self._since = [0.0] * pool.size
        """When each of these began the first, or was last seen to have got on with it."""
        self._steps = [0] * pool.size
        self._signs_of_life = [actor.steps.remote() for actor in self._actors]

    def start(self) -> None:
        """Wait until all processes answer, joined in one torch.distributed world."""
        limit_s = self._cluster.start_timeout_s
        meeting = self._wait(self._call("rendezvous", {0: ()}, limit_s))[0]
        names = self._wait(self._call("join", dict.fromkeys(range(self.size), (meeting,)), limit_s))
        self._ranks = list(names.values())
        self._open_channels(limit_s)

    def _open_channels(self, limit_s: float) -> None:
        """To the actors on the controller's node, where they can open this process's files."""
        node = ray.get_runtime_context().get_node_id()
        offered: dict[int, tuple[RankClient, tuple[Any, ...], Ends]] = {}
        for rank in range(self.size):
            (incoming, theirs_out), (theirs_in, outgoing) = Pipe(duplex=False), Pipe(duplex=False)
            answers, secret = SharedFile(), secrets.token_bytes(32)
            os.pwrite(answers.descriptor, secret, 0)
            files = answers.descriptor, self._requests_file.descriptor
            ends = Ends(node, os.getpid(), secret, *files, theirs_in.fileno(), theirs_out.fileno())
            channel = RankClient(rank, incoming, outgoing, self._requests, View(answers, writable=True))
            offered[rank] = channel, (theirs_in, theirs_out), ends
        arguments = {rank: (ends,) for rank, (_, _, ends) in offered.items()}
        attached = self._wait(self._call("attach", arguments, limit_s))
        for rank, (channel, theirs, _) in offered.items():
            for end in theirs:
                end.close()  # so that the end of the process is the end of the pipe
            if attached[rank]:
                self.channels[rank] = channel
                self._actors[rank].serve.remote()
            else:
                channel.close()

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        call = _Pending(range(self.size), self._cluster.timeout_s)
        others = [rank for rank in range(self.size) if rank not in self.channels]
        if others:
            self._call("create", dict.fromkeys(others, (name, ray.put(pack((kind, spec))))), call=call)
        self._request(call, name, CreateRequest(kind, spec), list(self.channels))
        return self._wait(call)[0]

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        sharing: dict[int, list[int]] = {}
        for rank, own in calls.items():
            sharing.setdefault(id(own), []).append(rank)
        call = _Pending(calls, self._cluster.timeout_s)
        for ranks in sharing.values():
            own = calls[ranks[0]]
            others = [rank for rank in ranks if rank not in self.channels]
            if others:
                packed = put(pack((method, own.args, own.kwargs)))
                self._call("perform", dict.fromkeys(others, (name, packed)), call=call)
            near = [rank for rank in ranks if rank in self.channels]
            self._request(call, name, CallRequest(method, own.args, own.kwargs), near)
        return self._cluster.events.future(call, partial(self._wait, call))

    def _request(self, call: PendingCall, name: str, request: CreateRequest | CallRequest, ranks: list[int]) -> None:
        """Ask these ranks over their channels."""
        self._check_open()
        if ranks:
            slot = self._requests.write(request, len(ranks))
            for rank in ranks:
                self.channels[rank].request(call, name, slot)

    def _call(
        self,
        method: str,
        arguments: dict[int, tuple[Any, ...]],
        limit_s: float | None = None,
        call: _Pending | None = None,
    ) -> _Pending:
        """Call the actors of these ranks; their answers are a call's own, or part of `call`'s."""
        self._check_open()
        call = call or _Pending(arguments, limit_s or self._cluster.timeout_s)
        for rank, own in arguments.items():
            if not self.pending[rank]:
                self._since[rank] = time.monotonic()
            self.pending[rank][getattr(self._actors[rank], method).remote(*own)] = call
        return call

    def _wait(self, call: PendingCall) -> dict[int, Any]:
        while call.missing:
            self._check_open()
            self._cluster.watch()
        return call.answers

    def _check_open(self) -> None:
        if self not in self._cluster.spawned:
            raise WorkerLost(f"pool {self._pool.name}: its processes have ended")

    def receive(self, rank: int, reference: ObjectRef, events: Events) -> None:
        """Take a rank's answer in. Raises what the worker raised; WorkerLost for what Ray raises."""
        call, self._since[rank] = self.pending[rank].pop(reference), time.monotonic()
        try:
            answer = ray.get(reference)
        except RayError as error:
            self._cluster.stacks()  # which tells of the process that died, if any
            raise WorkerLost(f"pool {self._pool.name}: {error}") from None
        if isinstance(answer, TandemError):
            raise answer
        events.answered(call, rank, unpack(answer))

    def receive_near(self, rank: int, events: Events) -> None:
        """As `receive`, over the rank's channel."""
        try:
            self.channels[rank].receive(events)
        except (EOFError, ConnectionResetError):
            self._cluster.stacks()  # which tells of the process that died
            raise WorkerLost(f"{self._ranks[rank]}: the process serves no more") from None

    def overdue(self) -> str:
        """What is said of a rank that does its first call for too long, "" where none does."""
        now = time.monotonic()
        for pending, since in zip(self.pending, self._since, strict=True):
            if pending and now - since > (limit_s := next(iter(pending.values())).limit_s):
                return f"pool {self._pool.name}: no answer in {limit_s:g} s"
        limit_s = self._cluster.timeout_s
        if any(channel.pending and now - channel.since > limit_s for channel in self.channels.values()):
            return f"pool {self._pool.name}: no answer in {limit_s:g} s"
        return ""

    def stacks(self) -> str:
        """The stacks of each process; WorkerLost when one is dead."""
        references = [actor.stacks.remote() for actor in self._actors]
        told = self._told(references, _PATIENCE_S)
        return "".join(f"{name}:\n{told.get(rank, 'too busy to answer')}\n" for rank, name in enumerate(self._ranks))

    def check_alive(self) -> None:
        """WorkerLost when a process is dead; does not wait, so that a busy process tells the next time."""
        for rank, steps in self._told(self._signs_of_life, 0).items():
            if steps != self._steps[rank]:
                self._steps[rank], self._since[rank] = steps, time.monotonic()
            self._signs_of_life[rank] = self._actors[rank].steps.remote()

    def _told(self, references: list[ObjectRef], patience_s: float) -> dict[int, Any]:
        """What the ranks that answer tell; WorkerLost when one is dead."""
        ready = set(ray.wait(references, num_returns=self.size, timeout=patience_s)[0])
        told: dict[int, Any] = {}
        for rank, reference in enumerate(references):
            try:
                if reference in ready:
                    told[rank] = ray.get(reference)
            except RayError as error:
                raise WorkerLost(f"{self._ranks[rank]}: the process died\n{error}") from None
        return told

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        if self in self._cluster.spawned:
            self._cluster.spawned.remove(self)
            for channel in self.channels.values():
                channel.end()
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=self.size, timeout=patience_s)
            for actor in self._actors:
                ray.kill(actor)
            for channel in self.channels.values():
                channel.close()
            remove_placement_group(self._group)


class RayCluster:
    """Pools on the Ray cluster at `address`, else at RAY_ADDRESS, else on one that is started on this machine.

    A failure in one pool ends them all; `spawn` starts anew. A program that called `ray.init` stays connected as it is.
    """

    def __init__(self, address: str | None = None, timeout_s: float = 1800.0, start_timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.spawned: list[RayRanks] = []
        self.events = Events()
        keep_freed_memory()
        self._looked = time.monotonic()
        self._connected = not ray.is_initialized()
        if self._connected:
            connect(address or os.environ.get("RAY_ADDRESS"), min(_LISTENS_S, start_timeout_s))

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

    @property
    def sources(self) -> list[EventSource]:
        return self.events.sources

    def watch(self, timeout_s: float | None = None) -> None:
        """Raises when anything is wrong with any process."""
        near = {channel.connection: (ranks, rank) for ranks in self.spawned for rank, channel in ranks.channels.items()}
        sources = self.events.connections()
        pending = {
            reference: (ranks, rank)
            for ranks in self.spawned
            for rank, references in enumerate(ranks.pending)
            for reference in references
        }
        asked = any(ranks.channels[rank].pending for ranks, rank in near.values())
        patience_s = self.events.patience_s(timeout_s, under_way=bool(sources or pending or asked))
        try:
            for reference in _ready(list(pending), [*near, *sources], patience_s):
                ranks, rank = pending[reference]
                ranks.receive(rank, reference, self.events)
            for connection in wait(list(near), 0):
                ranks, rank = near[connection]
                ranks.receive_near(rank, self.events)
            if time.monotonic() - self._looked > _LOOK_S:
                self._looked = time.monotonic()
                self._look()
        except TandemError as error:
            self._failed(error)
        self.events.run()

    def _look(self) -> None:
        """Raises WorkerLost when a process is dead, or a call is overdue."""
        for ranks in self.spawned:
            ranks.check_alive()
        if overdue := "; ".join(filter(None, [ranks.overdue() for ranks in self.spawned])):
            raise WorkerLost(f"{overdue}; all processes are at\n{self.stacks()}")

    def _failed(self, error: TandemError) -> NoReturn:
        """End everything. The cause is a dead process, if any, as that breaks collectives."""
        try:
            if not isinstance(error, WorkerLost):
                self.stacks()
        finally:
            self.end(patience_s=0.0)
        raise error

    def stacks(self) -> str:
        """The stacks of all processes; WorkerLost when one is dead."""
        return "".join([ranks.stacks() for ranks in self.spawned])

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        self.events.forget()
        for ranks in list(self.spawned):
            ranks.close(patience_s)

    def close(self) -> None:
        self.end()
        if self._connected:
            ray.shutdown()


def _ready(pending: list[ObjectRef], connections: list[Any], patience_s: float) -> list[ObjectRef]:
    """The answers that have come, after a wait for the first one, or, if it is readable before, for a connection."""
    deadline = time.monotonic() + patience_s
    while True:
        ready: list[ObjectRef] = ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else []
        left_s = deadline - time.monotonic()
        if ready or left_s <= 0 or (connections and wait(connections, 0 if pending else left_s)):
            return ready
        if pending:
            ray.wait(pending, num_returns=1, timeout=min(left_s, _POLL_S) if connections else left_s)
