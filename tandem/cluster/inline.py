"""One process: every worker is an object of the driver. A breakpoint is a breakpoint, a traceback is a traceback."""

from multiprocessing.connection import wait
from typing import Any, Self, TypeVar

from tandem.cluster.events import Events, PendingCall
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import EventSource, Future
from tandem.errors import UserError
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Calls, Mesh

Spec = TypeVar("Spec")


class InlineCluster:
    """Also the one rank of its pools. Calls are made when they are submitted, and exceptions come as they are."""

    size = 1

    def __init__(self) -> None:
        self.host = WorkerHost()
        self._events = Events()

    @property
    def sources(self) -> list[EventSource]:
        return self._events.sources

    def watch(self, timeout_s: float | None = None) -> None:
        connections = self._events.connections()
        if patience_s := self._events.patience_s(timeout_s, under_way=bool(connections)):
            wait(connections, patience_s)
        self._events.run()

    def spawn(self, pool: ResourcePool) -> Self:
        if pool.size != 1:
            raise UserError(f"pool {pool.name}: {pool.size} ranks do not fit one process")
        return self

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        return self.host.create(name, kind, spec)

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        answers = {rank: self.host.call(name, method, arguments) for rank, arguments in calls.items()}
        return self._events.future(PendingCall(()), lambda: answers)

    def close(self) -> None:
        self._events.forget()
        self.host.close()
