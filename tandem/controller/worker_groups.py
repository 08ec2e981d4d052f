"""Worker groups: one object in the controller for the workers of a role on all ranks of a pool.

    controller --group.call(method, batch)--> distribute --calls by rank--> Ranks --> WorkerHost.call --> worker
               <-------- Future <-------------- collect <------ answers by rank ------

A call returns at once; calls of one pool run in the order they were made, on different pools at the same time. The
controller is one thread: whatever it waits for, it waits in `Cluster.watch`, which takes in the answers of all pools
and runs the callbacks of all calls that are answered.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from tandem.controller.dispatch import distribute
from tandem.controller.placed import PlacedRows, distribute_rows
from tandem.controller.pools import ResourcePool
from tandem.types import Batch, StepMetrics
from tandem.workers.host import Worker
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, registration, returns_of_rows

T = TypeVar("T")
Spec = TypeVar("Spec")
W = TypeVar("W", bound=Worker[Any])
P = ParamSpec("P")
R = TypeVar("R")
Entry = TypeVar("Entry")
U = TypeVar("U")


class Future(Generic[T]):
    """An answer that may still be on its way."""

    def __init__(self, wait: Callable[[], T], notify: Callable[[Callable[[], None]], None]) -> None:
        """`wait` returns the answer. `notify` has what it is given run in the `watch` that takes the answer in, or, if
        it is there already, in the next one."""
        self._wait = wait
        self._notify = notify
        self._answer: list[T] = []

    def get(self) -> T:
        """Wait for it. Raises what the worker raised: WorkerError, WorkerLost, or a TandemError as it is; and what a
        callback of any call raised meanwhile."""
        if not self._answer:
            self._answer.append(self._wait())
        return self._answer[0]

    def then(self, callback: Callable[[T], None]) -> None:
        """Have `callback` called with the answer, in the `watch` that takes it in, or, if it is there already, in the
        next one; never in here.

        A callback may submit calls, and never waits. What it raises comes out of whatever the controller waits for. A
        call that fails has no answer: its failure comes out there, too.
        """
        self._notify(lambda: callback(self.get()))

    def map(self, function: Callable[[T], U]) -> "Future[U]":
        """The Future of what `function`, which is called once at most, makes of the answer."""
        return Future(lambda: function(self.get()), self._notify)


class Ranks(Protocol):
    """The running processes of one pool, each a `WorkerHost`.

    A worker that raises ends the call with WorkerError (a TandemError comes as it is); a process that dies, or a call
    that takes longer than `cluster.timeout_s`, ends it with WorkerLost. After either only `close` is legal.
    """

    size: int

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        """Make the worker `name` in every process; waits, returns its meshes."""
        ...

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        """Call the workers of these ranks; their answers by rank, in the order of the calls. Arrays in them are the
        caller's own."""
        ...

    def close(self) -> None:
        """End the processes, whatever they are doing. Safe to repeat."""
        ...


class EventSource(Protocol):
    """Something besides the ranks that the controller waits for, as scores of reward functions."""

    def connections(self) -> Sequence[Any]:
        """What `multiprocessing.connection.wait` takes, readable once `poll` has something to take in. Empty: nothing
        is under way."""
        ...

    def poll(self) -> None:
        """Take in what is there, hand out more work; never waits. Comes with every `watch`, so at least every second
        while the controller waits. What it raises comes out of whatever the controller waits for."""
        ...


class Cluster(Protocol):
    """Where processes come from.

    A failure of any call, also of one that nobody waits for, ends all pools, and comes out of whatever the controller
    waits for. Where a process is lost, pools without a call under way may live on until they are closed.
    """

    @property
    def sources(self) -> list[EventSource]:
        """Those that `watch` serves. Who adds one takes it away."""
        ...

    def watch(self, timeout_s: float | None = None) -> None:
        """Wait a moment, `timeout_s` at most, for answers of any rank of any pool or for a source; take them in, run
        the callbacks that are due, then poll each source. It does not wait where a callback is due already, or
        nothing is under way."""
        ...

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
        dispatch = registration(self._kind, method.__name__).dispatch
        assert dispatch not in (Dispatch.ALL, Dispatch.EACH), "take call_all or call_each: it has several"
        return self._submit(method.__name__, *args, **kwargs)

    def call_all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[list[R]]:
        """Call a method that is registered for `Dispatch.ALL`; the answers of all ranks."""
        assert registration(self._kind, method.__name__).dispatch is Dispatch.ALL, "take call: it has one answer"
        return self._submit(method.__name__, *args, **kwargs)

    def call_each(
        self,
        method: Callable[Concatenate[W, Entry, P], R],
        entries: Mapping[int, Entry],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[dict[int, R]]:
        """Call a method that is registered for `Dispatch.EACH`: the data-parallel groups that have an entry, each with
        its own; their answers, by number of the group."""
        assert registration(self._kind, method.__name__).dispatch is Dispatch.EACH, "take call or call_all"
        return self._submit(method.__name__, entries, *args, **kwargs)

    def peak_memory(self) -> Future[list[StepMetrics]]:
        """`perf/peak_memory_gib` of each rank's device so far, whole and by phase."""
        return self.call_all(Worker[Any].peak_memory)

    def call_rows(
        self, method: Callable[Concatenate[W, Batch, P], R], rows: Batch | PlacedRows, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Call a method that is registered for `Dispatch.DATA_PARALLEL` about a batch, or about rows that stay on the
        ranks."""
        return self._submit(method.__name__, rows, *args, **kwargs)

    def call_steps(
        self,
        method: Callable[Concatenate[W, Batch, P], R],
        steps: Sequence[PlacedRows],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[list[R]]:
        """Call a method that is registered for `Dispatch.DATA_PARALLEL` about several selections of rows that stay on
        the ranks, one after the other; the answer about each. It is one call: what comes next waits for all of them.

        A subclass of the kind that dispatches the method otherwise is called once for each.
        """
        if registration(self._kind, method.__name__).dispatch is Dispatch.DATA_PARALLEL:
            return self._submit(method.__name__, steps, *args, **kwargs)
        answers = [self._submit(method.__name__, rows, *args, **kwargs) for rows in steps]
        return answers[-1].map(lambda _: [answer.get() for answer in answers])

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        registered = registration(self._kind, method)
        mesh, takes_rows = self._meshes[registered.mesh], registered.dispatch is Dispatch.DATA_PARALLEL
        match args:
            case (PlacedRows() as rows, *others) if takes_rows:
                return self._submit(method, [rows], *others, **kwargs).map(itemgetter(0))
            case ([PlacedRows(), *_] as steps, *others) if takes_rows:
                forget = partial(self._submit, Worker[Any].forget_rows.__name__)
                arguments = Arguments(tuple(others), kwargs)
                calls, collect = distribute_rows(steps, self._ranks, forget, mesh, registered.returns, arguments)
            case (PlacedRows() as rows, *others):  # of a class that dispatches the method otherwise
                fill = partial(rows.fill, returns_of_rows(self._kind, method)) if rows.selection.fills else None
                calls, collect = distribute(registered, mesh, Arguments((rows.whole(), *others), kwargs))
                answer = self._ranks.submit(self._name, method, calls).map(collect)
                return answer.map(fill) if fill else answer
            case _:
                calls, collect = distribute(registered, mesh, Arguments(args, kwargs))
        return self._ranks.submit(self._name, method, calls).map(collect)


class WorkerGroup(RemoteWorkers[Worker[Any]]):
    """Workers of your own class: each of its registered methods is a method of the group that returns a Future."""

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        registration(self._kind, method)
        return partial(self._submit, method)
