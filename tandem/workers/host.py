"""A process of a pool, and the workers of all roles that live in it. The same in one process, on a machine, on Ray."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

from tandem.files import find_user_files
from tandem.types import StepMetrics
from tandem.workers.peak_memory import PeakMemory
from tandem.workers.placed import PlacedBatches, PlacedPart
from tandem.workers.registration import Arguments, Dispatch, Mesh, register, registration

Spec = TypeVar("Spec")
AnySpec = TypeVar("AnySpec")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker knows of the process that it runs in."""

    name: str
    """The worker's own, unique in its process: its role's, such as `actor`. A trained model's metrics begin with it."""
    rank: int = 0
    """The rank in its pool, which is also its rank in torch.distributed (not initialised in a pool of one)."""
    size: int = 1
    """Ranks of the pool."""
    address: str = "127.0.0.1"
    """Where processes of other pools reach this one."""
    colocated: "Mapping[str, Worker[Any]]" = field(default_factory=dict[str, "Worker[Any]"])
    """The workers in this process, by name."""
    memory: PeakMemory = field(default_factory=PeakMemory)
    placed: PlacedBatches = field(default_factory=PlacedBatches)
    """Rows that stay in this process for a step."""
    calls_fd: int | None = None
    """A file descriptor that is readable while another call waits for this process; None where that is not known."""


class Worker(Generic[Spec]):
    """Base class of what runs on a rank. `kind(context, spec)` makes one; the controller calls its registered methods.

    `spec` is all that a worker is made from: a frozen dataclass that can be pickled. The arguments of registered
    methods may be kept, but not changed: other ranks may see the same memory.
    """

    def __init__(self, context: WorkerContext, spec: Spec) -> None:
        self.context = context
        self.spec = spec

    @property
    def meshes(self) -> dict[str, Mesh]:
        """The grids of ranks that registered methods name; the same on every rank."""
        return {"training": Mesh({"data": self.context.size})}

    @register(Dispatch.ALL, mesh="ranks")
    def peak_memory(self) -> StepMetrics:
        """`perf/peak_memory_gib` of its GPU so far, whole and by phase, or of its process where there is none."""
        return self.context.memory.metrics()

    @register(Dispatch.ALL, mesh="ranks")
    def forget_rows(self, key: str) -> None:
        """The rows that a step has placed in this process are not needed any more. Safe to repeat."""
        self.context.placed.forget(key)

    def close(self) -> None:
        """Free what the worker holds outside its own memory."""


class WorkerHost:
    """Makes the workers of one process and runs the controller's calls on them, one at a time."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        address: str = "127.0.0.1",
        calls: int | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`calls`: as in WorkerContext. `goes_on` is called where a call that is long has got on, as from one optimizer
        step to the next: from then on `cluster.timeout_s` counts anew."""
        self.calls = calls
        self._rank = rank
        self._size = size
        self._address = address
        self.workers: dict[str, Worker[Any]] = {}
        self._memory = PeakMemory()
        self._placed = PlacedBatches(goes_on)
        find_user_files()

    def join(self, rendezvous: str, local_rank: int, timeout_s: float) -> None:
        """Enter the pool's torch.distributed world at `rendezvous` (an init_method URL); the ranks call it together."""
        import torch

        device = None
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            init_method=rendezvous,
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )

    def create(self, name: str, kind: type[Worker[AnySpec]], spec: AnySpec) -> dict[str, Mesh]:
        """Make a worker; returns its meshes."""
        place = name, self._rank, self._size, self._address
        context = WorkerContext(*place, self.workers, self._memory, self._placed, self.calls)
        with self._memory.measured("create"):
            self.workers[name] = kind(context, spec)
        return self.workers[name].meshes

    def call(self, name: str, method: str, arguments: Arguments) -> Any:
        """What the worker's method returns; of placed rows, what it returns about each selection of them."""
        worker = self.workers[name]
        bound: Callable[..., Any] = getattr(worker, method)
        with self._memory.measured(method):
            if arguments.args and isinstance(part := arguments.args[0], PlacedPart):
                returns = registration(type(worker), method).returns
                others, named = arguments.args[1:], arguments.kwargs
                return self._placed.call(part, returns, lambda batch: bound(batch, *others, **named))
            return bound(*arguments.args, **arguments.kwargs)

    def close(self) -> None:
        """Close the workers, the last one made first, and leave torch.distributed."""
        while self.workers:
            self.workers.popitem()[1].close()
        torch = sys.modules.get("torch")  # who has not imported it has joined nothing
        if torch is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def __str__(self) -> str:
        return f"rank {self._rank} of {self._size} on {socket.gethostname()} (process {os.getpid()})"
