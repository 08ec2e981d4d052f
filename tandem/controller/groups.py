"""Worker groups: one object in the controller for the workers of a role on all ranks of a pool.

    controller --group.method(batch)--> dispatch --one call a rank--> Ranks --> Host.call --> worker.method
               <------- Future <------- collect  <--------- answers by rank ---------

A call returns at once; calls of one pool run in the order they were made, on different pools at the same time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tandem.controller.pools import ResourcePool
from tandem.workers.dispatch import Arguments, Calls, Mesh, registration
from tandem.workers.host import Worker

T = TypeVar("T")


class Future(Generic[T]):
    """An answer that may still be on its way."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait
        self._answer: list[T] = []

    def get(self) -> T:
        """Wait for it. Raises what the worker raised: WorkerError, WorkerLost, or a TandemError as it is."""
        if not self._answer:
            self._answer.append(self._wait())
        return self._answer[0]


class Ranks(Protocol):
    """The running processes of one pool, each a `Host`.

    A worker that raises ends the call with WorkerError (a TandemError comes as it is); a process that dies, or a call
    that takes longer than `cluster.timeout_s`, ends it with WorkerLost. After either only `close` is legal.
    """

    size: int

    def create(self, role: str, kind: type[Worker], arguments: Arguments) -> dict[str, Mesh]:
        """Make a worker of `role` in every process; waits, answers its meshes."""
        ...

    def submit(self, role: str, method: str, calls: Calls) -> Future[list[Any]]:
        """Call the workers, one call a rank; the answers by rank, None where none was made. Arrays in answers are the
        caller's own."""
        ...

    def close(self) -> None:
        """End the processes, whatever they are doing. Safe to repeat."""
        ...


class Cluster(Protocol):
    """Where processes come from."""

    def spawn(self, pool: ResourcePool) -> Ranks:
        """Start the processes of a pool, joined in a torch.distributed world of their own; waits until they answer."""
        ...

    def close(self) -> None:
        """End everything that was spawned. Safe to repeat."""
        ...


class WorkerGroup:
    """The workers of one role. Registered methods of their class are methods of the group that return a Future."""

    def __init__(self, ranks: Ranks, role: str, kind: type[Worker], *args: Any, **kwargs: Any) -> None:
        self._ranks = ranks
        self._role = role
        self._kind = kind
        self._meshes = {"ranks": Mesh({"data": ranks.size}), **ranks.create(role, kind, Arguments(args, kwargs))}

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        registration(self._kind, method)
        return partial(self._call, method)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        registered = registration(self._kind, method)
        mesh, dispatch = self._meshes[registered.mesh], registered.dispatch
        calls = dispatch.distribute(mesh, Arguments(args, kwargs))
        answers = self._ranks.submit(self._role, method, calls)
        return Future(lambda: dispatch.collect(mesh, calls, answers.get()))
