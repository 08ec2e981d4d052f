"""Workers that take time and do nothing else: generation engines and models in virtual time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.simulation.continuous_batching import Decoding, SimulatedAnswers
from tandem.simulation.lengths import Lengths
from tandem.simulation.speeds import Speeds
from tandem.simulation.virtual import Timed, VirtualCluster
from tandem.types import Group, Prompt, Score, Status, Trajectory
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Dispatch, Mesh, register
from tandem.workers.rollout import ANSWERING, Advance, Ask

_NOTHING = np.zeros(0, np.int32)
_MADE = (_NOTHING, _NOTHING > 0, _NOTHING * 0.0, _NOTHING, "", Status.COMPLETED)
"""What is in a trajectory of which time alone is of interest."""


@dataclass(slots=True)
class World:
    """What the workers of a run share."""

    cluster: VirtualCluster
    speeds: Speeds
    lengths: Lengths
    max_running: int
    own_process: bool
    """Engines go on while their rank does other things; their caches do not outlive sleep or new weights."""
    answers: dict[int, SimulatedAnswers] = field(default_factory=dict[int, SimulatedAnswers])
    """By draw: those that no step has trained on."""
    engines: list[Decoding] = field(default_factory=list[Decoding])
    _news_at: float = -1.0

    def prompt_of(self, draw: int) -> Prompt:
        """The prompt of a draw, which will be asked: engines hear of it after their present slice."""
        lengths, prompt_tokens = self.lengths.of(draw)
        self.answers[draw] = SimulatedAnswers(draw, prompt_tokens, lengths)
        if self._news_at != self.cluster.now:
            self._news_at = self.cluster.now
            self.cluster.cut_slices()
        return Prompt(draw, _NOTHING, "", "", "")

    def bind(self, kind: "type[VirtualWorker]") -> "type[VirtualWorker]":
        """The kind of worker, in this world."""
        return type(kind.__name__, (kind,), {"world": self})


class VirtualWorker(Worker[Any]):
    """A worker of a kind that `World.bind` has made; what it is made from does not matter."""

    world: World


class VirtualEngine(VirtualWorker):
    """A generation engine. The verbs are those of `RolloutWorker`; each rank has one."""

    def __init__(self, context: WorkerContext, spec: Any) -> None:
        super().__init__(context, spec)
        self._decoding = Decoding(self.world.speeds.engine, self.world.max_running, padded=not self.world.own_process)
        self._asleep = False
        self.world.engines.append(self._decoding)

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"generation": Mesh({"data": self.context.size})}

    @register(ANSWERING, mesh="generation")
    def room(self) -> Timed:
        return Timed(0.0, lambda: self._room)

    @register(Dispatch.EACH, mesh="generation")
    def advance(self, asks: Mapping[int, Ask], patience_s: float) -> Timed:
        """All slices in which nothing would happen that the controller could act on are one."""
        self._catch_up()
        for number in asks:
            self._decoding.add(self.world.answers[number])
        missing = 1 - self._room  # so many rows must end until there is room for another ask
        now, decoding = self._decoding.now, self._decoding
        idle = decoding.done or not decoding.unfinished
        event = now if idle else decoding.next_event(missing if missing > 0 else decoding.unfinished)

        def finish() -> Advance:
            self._decoding.run(self.world.cluster.happening)
            done = [(one.number, *self._trajectories(one)) for one in decoding.done]
            tokens = sum(int(one.tokens) for one in decoding.done)
            decoding.done.clear()
            return Advance(done, self._room, tokens)

        return Timed(max(0.0, event - now), finish, patience_s)

    @register(ANSWERING, mesh="generation")
    def publish(self, version: int) -> Timed:
        seconds = self.world.speeds.publish_s if version else 0.0
        self._catch_up()
        self._decoding.stall(seconds)

        def finish() -> None:
            self._catch_up()
            if version:
                self._decoding.publish(version)
            if self.world.own_process:
                self._decoding.prefill_again()

        return Timed(seconds, finish)

    @register(ANSWERING, mesh="generation")
    def sleep(self) -> Timed:
        self._catch_up()
        self._asleep = True
        return Timed(self.world.speeds.pause_s, lambda: None)

    @register(ANSWERING, mesh="generation")
    def wake(self) -> Timed:
        def finish() -> None:
            self._catch_up()
            if self._asleep:
                self._decoding.prefill_again()
            self._asleep = False

        return Timed(self.world.speeds.pause_s if self._asleep else 0.0, finish)

    @register(Dispatch.ALL, mesh="generation")
    def join_bridge(self, address: str) -> Timed:
        return Timed(0.0, lambda: None)

    @property
    def _room(self) -> int:
        return self._decoding.max_running - self._decoding.unfinished

    def _catch_up(self) -> None:
        """What an engine in its own process has done since; any other stood still, and so does one that sleeps."""
        now = self.world.cluster.happening
        if self.world.own_process and not self._asleep:
            self._decoding.run(now)
        self._decoding.now = now

    def _trajectories(self, answers: SimulatedAnswers) -> tuple[list[Trajectory], Trajectory | None]:
        """All siblings are one object: only the time of the slowest counts."""
        prompt = Prompt(answers.number, _NOTHING, "", "", "")
        one = Trajectory(prompt, 0, *_MADE, generation_s=answers.ended_at - answers.asked_at)
        return [one] * len(answers.lengths), None


class VirtualModel(VirtualWorker):
    """A model in training or one that scores; one rank is called, or all where they are also the engines."""

    @property
    def meshes(self) -> dict[str, Mesh]:
        alone = {"data": 1, "tensor": self.context.size}
        return {"training": Mesh(alone if self.world.own_process else {"data": self.context.size})}

    @register(ANSWERING)
    def learn(self, tokens: float) -> Timed:
        speeds = self.world.speeds
        return Timed(speeds.train_step_s + speeds.train_token_s * tokens, lambda: None)

    @register(Dispatch.RANK_ZERO)
    def send_weights(self) -> Timed:
        return Timed(self.world.speeds.publish_s, lambda: None)

    @register(Dispatch.RANK_ZERO)
    def open_bridge(self, receivers: int, delta: bool) -> Timed:
        return Timed(0.0, lambda: "virtual")

    @register(Dispatch.RANK_ZERO)
    def join_bridge(self, address: str) -> Timed:
        return Timed(0.0, lambda: None)

    @register(Dispatch.RANK_ZERO)
    def offload(self) -> Timed:
        return Timed(0.0, lambda: None)

    @register(Dispatch.RANK_ZERO)
    def onload(self) -> Timed:
        return Timed(0.0, lambda: None)


class VirtualRewards:
    """Every group is scored after the same time; the scores of each differ, so that none is replaced."""

    by_step = False

    def __init__(self, cluster: VirtualCluster, seconds: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self._scores = [Score(0.0), Score(1.0)]

    def submit(
        self, answers_by_prompt: Sequence[list[Trajectory]], step: int, done: Callable[[list[Group]], None]
    ) -> None:
        groups = self.score(answers_by_prompt, step)
        self._cluster.at(self._cluster.now + self._seconds, lambda: done(groups))

    def score(self, answers_by_prompt: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        return [Group(trajectories, self._scores) for trajectories in answers_by_prompt]

    def so_far(self, siblings: list[Trajectory]) -> Group:
        """All at once or none."""
        return Group(siblings, [Score(None, failure=Status.NOT_SCORED) for _ in siblings])

    def check_share(self, groups: Iterable[Group]) -> None:
        """None fails."""

    def connections(self) -> Sequence[Any]:
        return []

    def poll(self) -> None:
        """The clock of the cluster is what its scores wait for."""
