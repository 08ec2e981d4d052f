"""The names by which articles on verl show a trainer: a thin face on `Trainer`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.config.cluster import RayClusterConfig
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.pools import ResourcePool, ResourcePoolManager, Role
from tandem.controller.reward_model import Rewards
from tandem.controller.worker_groups import WorkerGroup
from tandem.jobs.trainer import Trainer
from tandem.workers.host import Worker
from tandem.workers.rollout import RolloutWorker

Spec = TypeVar("Spec")


class RayWorkerGroup(WorkerGroup):
    """Workers of your own class as Ray actors: `RayWorkerGroup(ResourcePool("main", (4,)), Scorer, spec)`."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        kind: type[Worker[Spec]],
        spec: Spec = None,
        *,
        address: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Starts the pool's actors on the Ray cluster at `address`, as `cluster.address` says, and a worker in each.

        `timeout_s`: a call that takes longer ends them all with WorkerLost.
        """
        from tandem.cluster.ray import RayCluster

        self._cluster = RayCluster(address, timeout_s)
        super().__init__(self._cluster.spawn(resource_pool), resource_pool.name, kind, spec)

    def close(self) -> None:
        """End the actors."""
        self._cluster.close()


class RayPPOTrainer(Trainer):
    """`RayPPOTrainer(config).init_workers()`, then `.fit()`. Only `config` is needed; the algorithm is the config's."""

    def __init__(
        self,
        config: TrainConfig | Path | str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        role_worker_mapping: Mapping[Role, type[Worker[Any]]] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[WorkerGroup] = WorkerGroup,
        reward_fn: Rewards | None = None,
        val_reward_fn: Rewards | None = None,
    ) -> None:
        """`role_worker_mapping`: worker classes of your own; that of a fused role is its training role's.

        `ray_worker_group_cls`: RayWorkerGroup runs on Ray whatever `cluster.type` says. Everything else as for Trainer.
        """
        config = config if isinstance(config, TrainConfig) else load_config(TrainConfig, config)
        if issubclass(ray_worker_group_cls, RayWorkerGroup) and config.cluster.type != "ray":
            settings = config.cluster.model_dump(exclude={"type"})
            config = config.model_copy(update={"cluster": RayClusterConfig(type="ray", **settings)})
        kinds = {
            part: kind
            for role, kind in (role_worker_mapping or {}).items()
            for part in role.parts
            if (part is Role.Rollout) == issubclass(kind, RolloutWorker)
        }
        super().__init__(
            config,
            tokenizer=tokenizer,
            workers=kinds,
            pools=resource_pool_manager,
            reward=reward_fn,
            val_reward=val_reward_fn,
        )
