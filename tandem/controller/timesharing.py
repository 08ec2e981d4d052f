"""Whose turn the devices are, where several roles share them.

    phase         engine                        actor             critic            frozen **     reward model
    generation    all of it                     in host memory *  in host memory    host memory   host memory
    scoring       asleep                        in host memory *  in host memory    host memory   on the devices
    preparation   asleep                        on the devices    on the devices    on the devices  host memory
    update        asleep                        on the devices    on the devices    host memory   host memory
    publish       its weights, to be filled     on the devices    in host memory    host memory   host memory

An engine that sleeps is without what `generation.sleep` names; it sleeps in the phases alone in which models compute
that share its devices. * The native engine of one rank computes with the actor's own parameters, which therefore stay.
** The reference and a teacher. Models and an engine that have devices of their own stay there, whatever the phase: a
reference, a teacher or a reward model leaves devices that it shares with any other role, the actor and the critic those
that an engine shares. Each phase makes room before it takes any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.controller.roles import Model, Rollout

SleepPhase = Literal["scoring", "training"]
"""In which an engine may have to sleep; preparation and update are both training."""


class Devices(Protocol):
    """The loop announces each phase before it begins; a phase that is announced again changes nothing."""

    def engine_sleeps(self, phase: SleepPhase) -> bool:
        """Models compute on the engine's devices then."""
        ...

    def to_generation(self) -> None:
        """Generation follows."""
        ...

    def to_scoring(self) -> None:
        """The reward model scores."""
        ...

    def to_preparation(self) -> None:
        """The actor, the critic, the reference and the teacher compute, before the update."""
        ...

    def to_update(self) -> None:
        """The actor and the critic learn, until the next publish."""
        ...

    def publish(self, version: int) -> None:
        """The engine serves the actor's present weights as `version`; generation follows."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceTurns:
    """Who takes turns."""

    engine: frozenset[SleepPhase] = frozenset()
    """The phases in which it sleeps."""
    actor: Model | None = None
    """Where it leaves the engine's devices."""
    critic: Model | None = None
    """The same."""
    reference: Model | None = None
    """Where it leaves devices that it shares."""
    teacher: Model | None = None
    """The same."""
    reward_model: Model | None = None
    """The same."""

    @property
    def models(self) -> list[Model]:
        everyone = (self.critic, self.actor, self.reference, self.teacher, self.reward_model)
        return [model for model in everyone if model is not None]

    def make_room(self) -> None:
        """The models leave, before an engine is made that takes its share of what is free then."""
        for model in self.models:
            model.offload().get()


class TimeSharing:
    """Devices that roles take in turns."""

    def __init__(self, rollout: Rollout, fill: Callable[[int], None], turns: DeviceTurns | None = None) -> None:
        """The engine is awake, and `make_room` was called. `fill` brings the actor's present weights to the engine, as
        a version. Without `turns` nothing ever moves."""
        self._rollout = rollout
        self._fill = fill
        self._turns = turns or DeviceTurns()
        self._phase = "publish"
        self._asleep = False
        self._away = self._turns.models
        """In host memory."""

    def engine_sleeps(self, phase: SleepPhase) -> bool:
        return phase in self._turns.engine

    def to_generation(self) -> None:
        """After scoring alone: from training only `publish` leads back, for the engine lacks the new weights."""
        if self._phase != "generation":
            assert not self.engine_sleeps("training") or self._phase in ("publish", "scoring"), "publish first"
            self._leave(self._turns.reward_model)
            self._wake()
            self._phase = "generation"

    def to_scoring(self) -> None:
        if self._turns.reward_model is not None and self._phase != "scoring":
            self._sleep_for("scoring")
            self._return(self._turns.reward_model)
            self._phase = "scoring"

    def to_preparation(self) -> None:
        if self._phase not in ("preparation", "update"):
            self._sleep_for("training")
            self._leave(self._turns.reward_model)
            if not self.engine_sleeps("training"):
                self._wake()
            self._return(self._turns.actor, self._turns.critic, self._turns.reference, self._turns.teacher)
            self._phase = "preparation"

    def to_update(self) -> None:
        assert self._phase in ("preparation", "update"), "the models are not on the devices"
        self._leave(self._turns.reference, self._turns.teacher)
        self._phase = "update"

    def publish(self, version: int) -> None:
        self._leave(self._turns.critic, self._turns.reference, self._turns.teacher, self._turns.reward_model)
        self._fill(version)
        self._leave(self._turns.actor)
        self._wake()
        self._phase = "generation"

    def _leave(self, *models: Model | None) -> None:
        for model in models:
            if model is not None and model not in self._away:
                model.offload().get()
                self._away.append(model)

    def _return(self, *models: Model | None) -> None:
        for model in models:
            if model is not None and model in self._away:
                model.onload().get()
                self._away.remove(model)

    def _sleep_for(self, phase: SleepPhase) -> None:
        if self.engine_sleeps(phase) and not self._asleep:
            self._rollout.sleep().get()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._rollout.wake().get()
            self._asleep = False
