"""The order in which engine and trainers leave the devices and return to them."""

from tandem.cluster.inline import InlineCluster
from tandem.controller.groups import WorkerGroup
from tandem.controller.pools import ResourcePool
from tandem.controller.timesharing import TimeSharing
from tandem.workers.dispatch import Dispatch, register
from tandem.workers.host import Place, Worker


class Diary(Worker):
    """Writes down what it is told."""

    def __init__(self, place: Place, written: list[str]) -> None:
        super().__init__(place)
        self._written = written

    def _note(self, what: str) -> None:
        self._written.append(f"{self.place.role} {what}")

    @register(Dispatch.REPLICATED)
    def sleep(self) -> None:
        self._note("sleeps")

    @register(Dispatch.REPLICATED)
    def wake(self) -> None:
        self._note("wakes")

    @register(Dispatch.REPLICATED)
    def offload(self) -> None:
        self._note("leaves")

    @register(Dispatch.REPLICATED)
    def onload(self) -> None:
        self._note("returns")


def test_room_is_made_before_it_is_taken_and_weights_move_while_both_hold_them() -> None:
    written: list[str] = []
    ranks = InlineCluster().spawn(ResourcePool("main", (1,)))
    rollout, actor, critic = (WorkerGroup(ranks, role, Diary, written) for role in ("rollout", "actor", "critic"))
    turns = TimeSharing(rollout, [actor, critic], lambda version: written.append(f"weights {version}"))
    turns.to_training()
    turns.publish(3)
    assert written == [
        *("rollout sleeps", "actor returns", "critic returns"),
        "weights 3",
        *("actor leaves", "critic leaves", "rollout wakes"),
    ]
