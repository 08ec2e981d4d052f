"""One process: every worker is an object of the driver. A breakpoint is a breakpoint, a traceback is a traceback."""

from typing import Any, Self, TypeVar

from tandem.controller.groups import Future
from tandem.controller.pools import ResourcePool
from tandem.errors import UserError
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Calls, Mesh

Spec = TypeVar("Spec")


class InlineCluster:
    """Also the one rank of its pools. Calls are made when they are submitted, exceptions come as they are."""

    size = 1

    def __init__(self) -> None:
        self.host = WorkerHost()

    def spawn(self, pool: ResourcePool) -> Self:
        if pool.size != 1:
            raise UserError(f"pool {pool.name}: {pool.size} ranks do not fit one process")
        return self

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        return self.host.create(name, kind, spec)

    def submit(self, name: str, method: str, calls: Calls) -> Future[list[Any]]:
        answers = [None if call is None else self.host.call(name, method, call) for call in calls]
        return Future(lambda: answers)

    def close(self) -> None:
        self.host.close()
