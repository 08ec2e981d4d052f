"""The order in which engine and models leave the devices and return to them."""

from __future__ import annotations

from tandem.cluster.inline import InlineCluster
from tandem.controller.groups import WorkerGroup
from tandem.controller.pools import ResourcePool
from tandem.controller.timesharing import TimeSharing
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, register


class Diary(Worker[list[str]]):
    """Writes down what it is told."""

    def _note(self, what: str) -> None:
        self.spec.append(f"{self.context.name} {what}")

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


def shared_devices(written: list[str], *models: str, reward_model: str | None = None) -> TimeSharing:
    ranks = InlineCluster().spawn(ResourcePool("main", (1,)))
    rollout = WorkerGroup(ranks, "rollout", Diary, written)
    groups = [WorkerGroup(ranks, name, Diary, written) for name in models]
    scorer = WorkerGroup(ranks, reward_model, Diary, written) if reward_model else None
    return TimeSharing(rollout, groups, scorer, lambda version: written.append(f"weights {version}"))


def test_room_is_made_before_it_is_taken_and_weights_move_while_both_hold_them() -> None:
    written: list[str] = []
    devices = shared_devices(written, "actor", "critic")
    devices.to_training()
    devices.to_training()
    devices.publish(3)
    devices.to_generation()
    assert written == [
        *("rollout sleeps", "actor returns", "critic returns"),
        "weights 3",
        *("actor leaves", "critic leaves", "rollout wakes"),
    ]


def test_a_reward_model_is_on_the_devices_while_it_scores_alone() -> None:
    written: list[str] = []
    devices = shared_devices(written, "actor", reward_model="reward_model")
    devices.publish(0)
    assert written == ["weights 0", "actor leaves", "reward_model leaves", "rollout wakes"]
    written.clear()
    devices.to_generation()
    devices.to_scoring()
    assert written == ["rollout sleeps", "reward_model returns"]
    written.clear()
    devices.to_generation()  # a further round of prompts
    assert written == ["reward_model leaves", "rollout wakes"]
    devices.to_scoring()
    written.clear()
    devices.to_training()
    assert written == ["rollout sleeps", "reward_model leaves", "actor returns"]


def test_without_a_reward_model_scoring_moves_nothing() -> None:
    written: list[str] = []
    devices = shared_devices(written, "actor")
    devices.publish(0)
    written.clear()
    devices.to_scoring()
    devices.to_generation()
    assert written == []
