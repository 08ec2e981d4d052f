"""A training run in virtual time: the real producer, engines' dispatch, roles and devices, over workers that take time.

    configuration + Setup --simulate--> SimulatedRun

The stages of a step are those of `train_step`; what it computes of the groups is left out, for arrays of tokens would
take most of the time, and none of them has an effect on when anything happens.
"""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Need
from tandem.config.generation import NativeGenerationConfig
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import make_producer, make_roles
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.worker_groups import RemoteWorkers
from tandem.errors import UserError
from tandem.simulation.continuous_batching import Work
from tandem.simulation.speeds import Setup
from tandem.simulation.virtual import VirtualCluster
from tandem.simulation.virtual_workers import VirtualEngine, VirtualModel, VirtualRewards, World
from tandem.types import Group
from tandem.workers.rollout import ranks_per_engine


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Of a simulated run, from the step on where it goes evenly."""

    max_staleness: int
    step_s: float
    tokens_per_s: float
    """Prompt and response tokens that were trained."""
    trainer_waits: float
    """Share of the time in which the step waits for groups."""
    engines_idle: float
    """Share of the time in which an engine decodes nothing, on average."""
    rows: float
    """Samples that decode side by side, on average over the time in which an engine decodes."""
    mean_staleness: float
    """Of the trained tokens."""
    most_staleness: int
    step_times_s: Sequence[float]
    """Of all steps, from the first."""
    work: Work
    """What all engines have done, from the first step."""
    trained_response_tokens: float
    """From the first step."""
    events: int


def simulate(config: TrainConfig, setup: Setup, steps: int) -> SimulatedRun:
    """`steps` of a run with the configuration's staleness. Raises Deadlock where it would hang."""
    refuse_unsimulated(config)
    with _collector_off():
        return _simulate(config, setup, steps)


@contextmanager
def _collector_off() -> Generator[None]:
    """Python's search for cycles goes through all of torch again and again, 40% of the time, and finds none of ours."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _simulate(config: TrainConfig, setup: Setup, steps: int) -> SimulatedRun:
    speeds = setup.speeds
    cluster = VirtualCluster()
    world = _make_world(config, cluster, setup)
    total_steps = steps + config.trainer.max_staleness + 1  # at the end of a run less and less is generated ahead
    algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
    kinds = {role: world.bind(VirtualModel) for role in Role} | {Role.Rollout: world.bind(VirtualEngine)}
    placement = Placement(cluster, _pools(config), kinds)
    reward: Any = VirtualRewards(cluster, speeds.reward_s)
    no_tokenizer: Any = None
    roles = make_roles(config, no_tokenizer, algorithm, total_steps, placement, reward)
    producer = make_producer(
        config, roles.experience, placement, world.prompt_of, total_steps, algorithm.needs, lambda: cluster.now
    )
    actor = cast(RemoteWorkers[VirtualModel], roles.actor)
    record = _Record(world, config.trainer.max_staleness)
    for step in range(1, steps + 1):
        groups = producer.take(step)
        tokens = record.took(step, groups)
        producer.to_preparation()
        actor.call(VirtualModel.learn, tokens).get()
        producer.publish(step)
        cluster.spend(speeds.controller_s)
        record.ended()
    return record.outcome()


def refuse_unsimulated(config: TrainConfig) -> None:
    """Raises UserError for what a simulation would leave out."""
    if config.conversation is not None:
        raise UserError(
            "conversation: answers of several turns are not simulated, for their waits for tools, users and worlds are "
            "no time of the engine's; leave the section out for how long the tokens alone would take"
        )
    if config.model.reward_model_path is not None:
        raise UserError(
            "model.reward_model_path: a reward model is not simulated; leave it out, and give its time with --reward-s"
        )
    if config.model.judge_path is not None:
        raise UserError("model.judge_path: a judge is not simulated; leave it out, and give its time with --reward-s")
    if config.algorithm.served_teacher is not None:
        raise UserError("algorithm.teacher: a served teacher is not simulated; give a model.teacher_path")
    if config.algorithm.top_tokens:
        raise UserError("algorithm.top_k: it is not simulated; leave it out, for it takes no other time")
    if not isinstance(config.generation, NativeGenerationConfig) and config.generation.replicas > 1:
        raise UserError("generation.replicas: several engines on a rank are not simulated; give each a rank")
    if Need.GREEDY_REWARDS in make_algorithm(config.algorithm, config.generation.max_response_tokens).needs:
        raise UserError(
            f"algorithm.type: {config.algorithm.type} has a greedy answer made for each prompt, which is not simulated"
        )


def _pools(config: TrainConfig) -> ResourcePoolManager:
    """Those of the configuration; of neighbours that share an engine, and so do the same at the same time, one."""
    real = pools_of(config)
    names = {role: real.get_resource_pool(role).name for role in Role if len(role.parts) == 1}
    sizes = {name: pool.size for name, pool in real.pools.items()}
    if not isinstance(config.generation, NativeGenerationConfig):
        generating = names[Role.Rollout]
        sizes[generating] //= ranks_per_engine(config.generation.tensor_parallel, sizes[generating])
    return ResourcePoolManager({name: [size] for name, size in sizes.items()}, names)


def _make_world(config: TrainConfig, cluster: VirtualCluster, setup: Setup) -> World:
    native = isinstance(config.generation, NativeGenerationConfig)
    running = config.generation.max_running if isinstance(config.generation, NativeGenerationConfig) else None
    return World(cluster, setup.speeds, setup.lengths, running or setup.max_running, own_process=not native)


@dataclass(slots=True)
class _Moment:
    """The end of a step: sums from the first step on."""

    at_s: float = 0.0
    waited_s: float = 0.0
    tokens: float = 0.0
    stale_tokens: float = 0.0
    response_tokens: float = 0.0
    work: Work = field(default_factory=Work)


class _Record:
    """What a run comes to."""

    def __init__(self, world: World, max_staleness: int) -> None:
        self._world = world
        self._max_staleness = max_staleness
        self._moments = [_Moment()]
        self._most_staleness = 0
        self._tokens = self._stale_tokens = self._response_tokens = self._waited_s = 0.0

    def took(self, step: int, groups: Sequence[Group]) -> float:
        """A step has its groups: their tokens."""
        self._waited_s += self._world.cluster.now - self._moments[-1].at_s
        trained = [self._world.answers.pop(group.trajectories[0].prompt.index) for group in groups]
        responses = sum(one.tokens for one in trained)
        prompts = sum(one.prompt_tokens * len(one.lengths) for one in trained)
        self._tokens += responses + prompts
        self._response_tokens += responses
        self._stale_tokens += (step - 1) * responses - sum(one.version_tokens for one in trained)
        self._most_staleness = max(self._most_staleness, step - 1 - min(one.oldest_version for one in trained))
        assert self._most_staleness <= self._max_staleness
        return responses + prompts

    def ended(self) -> None:
        """The step is published."""
        self._moments.append(
            _Moment(
                self._world.cluster.now,
                self._waited_s,
                self._tokens,
                self._stale_tokens,
                self._response_tokens,
                self._work(),
            )
        )

    def outcome(self) -> SimulatedRun:
        steps = len(self._moments) - 1
        together = self._max_staleness + 1  # so many steps may get their groups at once, and wait for the next together
        counted = max(1, (steps - min(2 * together, steps // 3)) // together) * together
        first, last = self._moments[max(0, steps - counted)], self._moments[-1]
        counted, seconds = min(counted, steps), last.at_s - first.at_s
        decoding_s = last.work.decoding_s - first.work.decoding_s
        responses = last.response_tokens - first.response_tokens
        ends = [moment.at_s for moment in self._moments]
        return SimulatedRun(
            max_staleness=self._max_staleness,
            step_s=seconds / counted,
            tokens_per_s=(last.tokens - first.tokens) / seconds,
            trainer_waits=(last.waited_s - first.waited_s) / seconds,
            engines_idle=1 - decoding_s / seconds / len(self._world.engines),
            rows=(last.work.row_seconds - first.work.row_seconds) / decoding_s,
            mean_staleness=(last.stale_tokens - first.stale_tokens) / responses,
            most_staleness=self._most_staleness,
            step_times_s=[end - start for start, end in pairwise(ends)],
            work=last.work,
            trained_response_tokens=last.response_tokens,
            events=self._world.cluster.events,
        )

    def _work(self) -> Work:
        works = [engine.work for engine in self._world.engines]
        return Work(
            sum(work.tokens for work in works),
            sum(work.decoding_s for work in works),
            sum(work.row_seconds for work in works),
        )
