"""Whose turn the devices are, where an engine in processes of its own shares them with the models.

    phase        engine                                             trained models, reference    reward model
    generation   all of it                                          in host memory               in host memory
    scoring      asleep: without what `generation.sleep` names      in host memory               on the devices
    training     asleep                                             on the devices               in host memory
    publish      its weights, to be filled; no cache                on the devices               in host memory

Each phase makes room before it takes any. Pools that generate alone stay awake, and so do their models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tandem.controller.roles import Model, Rollout


class Devices(Protocol):
    """The loop announces each phase before it begins; a phase that is announced again changes nothing."""

    takes_turns: ClassVar[bool]
    """The engine sleeps in some phases."""

    def to_generation(self) -> None:
        """Generation follows."""
        ...

    def to_scoring(self) -> None:
        """The reward model scores."""
        ...

    def to_training(self) -> None:
        """The actor, the critic and the reference compute until the next publish."""
        ...

    def publish(self, version: int) -> None:
        """The engine serves the actor's present weights as `version`; generation follows."""
        ...


@dataclass(frozen=True, slots=True)
class UnsharedDevices:
    """Every role keeps its place."""

    fill: Callable[[int], None]
    """Brings the actor's present weights to the engine, as a version."""
    takes_turns: ClassVar[bool] = False

    def publish(self, version: int) -> None:
        """Nothing but the weights moves."""
        self.fill(version)

    def to_generation(self) -> None:
        """Nothing moves."""

    def to_scoring(self) -> None:
        """Nothing moves."""

    def to_training(self) -> None:
        """Nothing moves."""


@dataclass(slots=True)
class TimeSharing:
    """Devices that engine and models take in turns."""

    rollout: Rollout
    models: Sequence[Model]
    """The actor, the critic, the reference: those that share the engine's devices."""
    reward_model: Model | None
    """The same for the reward model."""
    fill: Callable[[int], None]
    """Brings the actor's present weights to the engine, as a version."""
    takes_turns: ClassVar[bool] = True
    _phase: str = "publish"

    def to_generation(self) -> None:
        """After scoring alone: from training only `publish` leads back, for the engine lacks the new weights."""
        if self._phase != "generation":
            assert self._phase == "scoring", "publish first"
            self._offload_reward_model()
            self.rollout.wake().get()
            self._phase = "generation"

    def to_scoring(self) -> None:
        if self.reward_model is not None and self._phase != "scoring":
            self.rollout.sleep().get()
            self.reward_model.onload().get()
            self._phase = "scoring"

    def to_training(self) -> None:
        if self._phase != "training":
            self.rollout.sleep().get()
            self._offload_reward_model()
            for model in self.models:
                model.onload().get()
            self._phase = "training"

    def publish(self, version: int) -> None:
        self.fill(version)
        for model in self.models:
            model.offload().get()
        self._offload_reward_model()
        self.rollout.wake().get()
        self._phase = "generation"

    def _offload_reward_model(self) -> None:
        if self.reward_model is not None:
            self.reward_model.offload().get()
