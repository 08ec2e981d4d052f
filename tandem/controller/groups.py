"""Worker groups: one object in the controller for the workers of a role on all ranks of a pool.

    controller --group.call(method, batch)--> distribute --one call a rank--> Ranks --> WorkerHost.call --> worker
               <-------- Future <-------------- collect <------ answers by rank ------

A call returns at once; calls of one pool run in the order they were made, on different pools at the same time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from tandem.controller.dispatch import collect, distribute
from tandem.controller.pools import ResourcePool
from tandem.types import StepMetrics
from tandem.workers.host import Worker
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, registration

T = TypeVar("T")
Spec = TypeVar("Spec")
W = TypeVar("W", bound=Worker[Any])
P = ParamSpec("P")
R = TypeVar("R")


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
    """The running processes of one pool, each a `WorkerHost`.

    A worker that raises ends the call with WorkerError (a TandemError comes as it is); a process that dies, or a call
    that takes longer than `cluster.timeout_s`, ends it with WorkerLost. After either only `close` is legal.
    """

    size: int

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        """Make the worker `name` in every process; waits, returns its meshes."""
        ...

    def submit(self, name: str, method: str, calls: Calls) -> Future[list[Any]]:
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


class RemoteWorkers(Generic[W]):
    """The workers of one name, one on each rank of a pool. A subclass says in types what its role can be asked for."""

    def __init__(self, ranks: Ranks, name: str, kind: type[W], spec: Any = None) -> None:
        """Makes the workers: `kind(context, spec)` on every rank."""
        self._ranks = ranks
        self._name = name
        self._kind = kind
        self._meshes = {"ranks": Mesh({"data": ranks.size}), **ranks.create(name, kind, spec)}

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a registered method, given as `Kind.method`, on the ranks that its dispatch names; one answer for all.

        A subclass of the kind may override the method, and with `register` how it is dispatched.
        """
        assert registration(self._kind, method.__name__).dispatch is not Dispatch.ALL, "take call_all: it has a list"
        return self._submit(method.__name__, *args, **kwargs)

    def call_all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[list[R]]:
        """Call a method that is registered for `Dispatch.ALL`; the answers of all ranks."""
        assert registration(self._kind, method.__name__).dispatch is Dispatch.ALL, "take call: it has one answer"
        return self._submit(method.__name__, *args, **kwargs)

    def peak_memory(self) -> Future[list[StepMetrics]]:
        """`perf/peak_memory_gib` of each rank's device so far, whole and by phase."""
        return self.call_all(Worker[Any].peak_memory)

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        registered = registration(self._kind, method)
        mesh = self._meshes[registered.mesh]
        calls = distribute(registered, mesh, Arguments(args, kwargs))
        answers = self._ranks.submit(self._name, method, calls)
        return Future(lambda: collect(registered, mesh, calls, answers.get()))


class WorkerGroup(RemoteWorkers[Worker[Any]]):
    """Workers of your own class: each of its registered methods is a method of the group that returns a Future."""

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        registration(self._kind, method)
        return partial(self._submit, method)
