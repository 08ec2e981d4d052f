"""Configuration -> the roles of a run: worker groups on the pools that they are placed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Signal
from tandem.config.algorithms import OwnAlgorithmConfig, PPOConfig
from tandem.config.tree import RunConfig, TrainConfig
from tandem.controller.groups import Cluster, Ranks, WorkerGroup
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.reward_model import ModelRewards, Rewards
from tandem.controller.timesharing import TimeSharing
from tandem.types import StepMetrics
from tandem.workers.host import Worker
from tandem.workers.rollout import RolloutWorker
from tandem.workers.training import TrainWorker


class Placement:
    """Starts each pool at its first role, and puts every further role of the pool into the same processes."""

    def __init__(
        self, cluster: Cluster, pools: ResourcePoolManager, kinds: Mapping[Role, type[Worker]] | None = None
    ) -> None:
        """`kinds`: the user's own worker classes, by role."""
        self._cluster = cluster
        self._pools = pools
        self._kinds = kinds or {}
        self._running: dict[str, Ranks] = {}
        self._first: list[WorkerGroup] = []
        """Of each pool."""

    def group(self, role: Role, kind: type[Worker], *args: Any, **kwargs: Any) -> WorkerGroup:
        """A worker of `role` on every rank of its pool; a role that lives off another's worker is made after it."""
        pool = self._pools.get_resource_pool(role)
        first = pool.name not in self._running
        if first:
            self._running[pool.name] = self._cluster.spawn(pool)
        group = WorkerGroup(self._running[pool.name], role, self._kinds.get(role, kind), *args, **kwargs)
        self._first += [group] if first else []
        return group

    def size(self, role: Role) -> int:
        return self._pools.get_resource_pool(role).size

    def together(self, *roles: Role) -> bool:
        """The roles share their processes."""
        return len({self._pools.get_resource_pool(role).name for role in roles}) == 1

    def costs(self, tokens: float, seconds: float) -> StepMetrics:
        """Of a step: its time, throughput, and the highest peak memory of any process so far."""
        peaks: list[StepMetrics] = [peak for group in self._first for peak in group.peak_memory().get()]
        return {
            "time/step_s": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_gpu": tokens / seconds / len(peaks),
            **{name: max(peak.get(name, 0.0) for peak in peaks) for one in peaks for name in one},
        }

    def close(self) -> None:
        for ranks in self._running.values():
            ranks.close()


def pools_of(config: RunConfig) -> ResourcePoolManager:
    """The pools of `placement`, by default one of `cluster.ranks` for every role."""
    if not isinstance(config, TrainConfig) or not config.placement.pools:
        return ResourcePoolManager({"main": [config.cluster.ranks or 1]}, dict.fromkeys(Role, "main"))
    first = next(iter(config.placement.pools))
    placed = {Role(name): pool for name, pool in config.placement.roles.items()}
    mapping = {role: placed.get(role, first) for role in Role if len(role.parts) == 1}
    return ResourcePoolManager(config.placement.pools, mapping)


@dataclass(slots=True)
class Roles:
    """Who does the work of a step. The algorithm's needs decide which of the optional ones exist."""

    reward: Rewards
    actor: WorkerGroup
    rollout: WorkerGroup
    publish: Callable[[int], None]
    """Makes the rollout serve the actor's present weights as a version, larger than every version before."""
    reference: WorkerGroup | None = None
    critic: WorkerGroup | None = None
    trained: dict[str, WorkerGroup] = field(default_factory=dict[str, WorkerGroup])
    """What a checkpoint holds, by its directory there."""
    to_training: Callable[[], None] = lambda: None
    """Gives the devices to the trainers, where generation shares them; `publish` gives them back."""


def make_roles(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    algorithm: Algorithm,
    total_steps: int,
    placement: Placement,
    reward: Rewards,
) -> Roles:
    """The roles that the algorithm needs; the rollout serves version 0."""
    training, temperature = config.training, config.generation.temperature
    optimizer_steps = total_steps * config.algorithm.epochs * config.algorithm.minibatches
    policy = (TrainWorker, config.model, training)
    actor = placement.group(Role.Actor, *policy, training.optimizer, optimizer_steps, temperature)
    rollout = make_rollout(config, tokenizer, placement)
    delta = config.generation.type != "native" and config.generation.sync.delta
    publish = connect(actor, rollout, placement, delta)
    roles = Roles(reward, actor, rollout, publish, trained={".": actor})
    if Signal.REF_LOGPROBS in algorithm.needs:
        roles.reference = placement.group(Role.RefPolicy, *policy, None, 1, temperature)
    if Signal.VALUES in algorithm.needs:
        assert isinstance(config.algorithm, PPOConfig | OwnAlgorithmConfig)
        optimizer = config.algorithm.critic_optimizer
        roles.critic = placement.group(Role.Critic, *policy, optimizer, optimizer_steps, critic=True)
        roles.trained["critic"] = roles.critic
    sleeps = config.generation.type != "native" and config.generation.sleep != "never"
    if sleeps and placement.together(Role.Actor, Role.Rollout):
        here = [role for role in (Role.Actor, Role.RefPolicy, Role.Critic) if placement.together(role, Role.Rollout)]
        groups = {Role.Actor: actor, Role.RefPolicy: roles.reference, Role.Critic: roles.critic}
        turns = TimeSharing(rollout, [group for role in here if (group := groups[role])], publish)
        roles.publish, roles.to_training = turns.publish, turns.to_training
    if config.model.reward_model_path is not None:
        model = config.model.model_copy(update={"critic_path": config.model.reward_model_path})
        judge = placement.group(Role.RewardModel, TrainWorker, model, training, None, critic=True)
        roles.reward = ModelRewards(judge, config.reward.model_weight, reward, alone=not config.reward.functions)
    roles.publish(0)
    return roles


def connect(
    actor: WorkerGroup, rollout: WorkerGroup, placement: Placement, delta: bool = False
) -> Callable[[int], None]:
    """How the actor's weights get to the rollout: `publish(version)`. On different pools they travel over a bridge."""
    if placement.together(Role.Actor, Role.Rollout):
        return lambda version: rollout.publish(version).get()
    rollout.join_bridge(actor.open_bridge(placement.size(Role.Rollout), delta).get()).get()

    def publish(version: int) -> None:
        sending = actor.send_weights()
        rollout.publish(version).get()
        sending.get()

    return publish


def make_rollout(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, placement: Placement) -> WorkerGroup:
    return placement.group(Role.Rollout, RolloutWorker, config.model, config.generation, tokenizer)
