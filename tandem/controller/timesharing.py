"""Whose memory is on the devices, where an engine in processes of its own shares them with training.

    phase        engine                                             trainers
    generation   all of it                                          in host memory
    training     asleep: without what `generation.sleep` names      on the devices
    publish      its weights, to be filled; no cache                on the devices

Each phase makes room before it takes any. Pools that generate alone stay awake, and so do their trainers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.controller.groups import WorkerGroup


@dataclass(frozen=True, slots=True)
class TimeSharing:
    rollout: WorkerGroup
    trainers: Sequence[WorkerGroup]
    fill: Callable[[int], None]
    """Brings the actor's present weights to the engine, as a version."""

    def to_training(self) -> None:
        """Safe to repeat."""
        self.rollout.sleep().get()
        for trainer in self.trainers:
            trainer.onload().get()

    def publish(self, version: int) -> None:
        """The end of training: fill the engine's weights, leave the devices to it."""
        self.fill(version)
        for trainer in self.trainers:
            trainer.offload().get()
        self.rollout.wake().get()
