"""The trainer as articles on verl show it: a thin face on the loop that `tandem train` runs."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.cluster import make_cluster
from tandem.config.load import load_config
from tandem.config.tree import RayClusterConfig, TrainConfig
from tandem.controller.groups import WorkerGroup
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.data.dataset import RLHFDataset
from tandem.jobs.inputs import read_inputs
from tandem.jobs.rl import RlJob
from tandem.jobs.run import claim_run_dir, run_job
from tandem.reward.manager import RewardManager
from tandem.workers.host import Worker
from tandem.workers.rollout import RolloutWorker


class RayWorkerGroup(WorkerGroup):
    """Workers that are Ray actors; given to RayPPOTrainer it chooses Ray, whatever `cluster.type` says."""


class RayPPOTrainer:
    """`RayPPOTrainer(config).init_workers()`, then `.fit()`. Only `config` is needed; the algorithm is the config's."""

    def __init__(
        self,
        config: TrainConfig | Path | str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        role_worker_mapping: Mapping[Role, type[Worker]] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[WorkerGroup] = WorkerGroup,
        reward_fn: RewardManager | None = None,
        val_reward_fn: RewardManager | None = None,
    ) -> None:
        """`role_worker_mapping`: worker classes of your own; that of a fused role is its training role's.

        `resource_pool_manager`: default `placement` and `cluster.ranks`. `reward_fn`: default `reward`; it judges the
        validation answers too unless `val_reward_fn` does. Raises UserError with every mistake in config and data.
        """
        config = config if isinstance(config, TrainConfig) else load_config(TrainConfig, Path(config))
        if issubclass(ray_worker_group_cls, RayWorkerGroup) and config.cluster.type != "ray":
            settings = config.cluster.model_dump(exclude={"type"})
            config = config.model_copy(update={"cluster": RayClusterConfig(type="ray", **settings)})
        self.config = config
        inputs = read_inputs(config, RLHFDataset)
        self._inputs = inputs if tokenizer is None else replace(inputs, tokenizer=tokenizer)
        self._pools = resource_pool_manager or pools_of(config)
        self._kinds = {
            part: kind
            for role, kind in (role_worker_mapping or {}).items()
            for part in role.parts
            if (part is Role.Rollout) == issubclass(kind, RolloutWorker)
        }
        self._reward, self._val_reward = reward_fn, val_reward_fn
        self._open = ExitStack()
        self._job: RlJob | None = None

    def init_workers(self) -> None:
        """Claim the run directory, start the processes, load the models."""
        self._open.enter_context(claim_run_dir(self.config))
        self._cluster = self._open.enter_context(closing(make_cluster(self.config, self._pools)))
        trainer = self.config.trainer
        self._reward = self._reward or RewardManager(self.config.reward, trainer.seed)
        for reward in filter(None, (self._reward, self._val_reward)):
            self._open.enter_context(closing(reward))
        with self._open.pop_all() as opened:
            self._job = self._make_job()
            self._open = opened.pop_all()

    def fit(self) -> bool:
        """Train to the last step, or to Ctrl-C or SIGTERM (then False)."""
        with self._open:
            return run_job(self.config, self._make_job) is None

    def _make_job(self) -> RlJob:
        """The job of `init_workers`; after workers were lost, a new one."""
        job, self._job = self._job, None
        assert self._reward is not None, "call init_workers first"
        placement = Placement(self._cluster, self._pools, self._kinds)
        return job or RlJob(self.config, self._inputs, placement, self._reward, self._val_reward)
