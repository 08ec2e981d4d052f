"""Runs from Python: `Trainer` for reinforcement learning, `train` for any kind of training."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.checkpoint.fork import Fork
from tandem.cluster import make_cluster
from tandem.config.load import load_config
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import ResourcePoolManager, Role
from tandem.controller.reward_model import Rewards
from tandem.controller.worker_groups import Cluster
from tandem.data.dataset import RLHFDataset
from tandem.data.preference import PreferenceDataset, dataset_of
from tandem.data.sft import DemonstrationDataset, SftDataset
from tandem.errors import UserError
from tandem.jobs import preference, sft
from tandem.jobs.callbacks import Callback
from tandem.jobs.inputs import Inputs, read_inputs
from tandem.jobs.result import Run
from tandem.jobs.rl import RlJob, make_reward_manager
from tandem.jobs.run import claim_run_dir, find_start, run_job
from tandem.reward.manager import RewardManager
from tandem.signals import StopReason
from tandem.types import Demonstration, Preference
from tandem.workers.host import Worker
from tandem.workers.rollout import RolloutWorker


class Trainer:
    """Reinforcement learning as `tandem train` runs it: `Trainer(config).fit()`; `algorithm` names the algorithm."""

    def __init__(
        self,
        config: TrainConfig | Path | str | Mapping[str, Any],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        workers: Mapping[Role, type[Worker[Any]]] | None = None,
        pools: ResourcePoolManager | None = None,
        reward: Rewards | None = None,
        val_reward: Rewards | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Read configuration and data; UserError with every mistake in them. Nothing is started yet.

        `config`: a configuration, its file, or a mapping as `load_config` takes it. `tokenizer`: default that of
        `model.path`. `workers`: worker classes of your own, by role. `pools`: default `placement` and `cluster.ranks`.
        `reward`: default what `reward` says; it scores the validation answers too unless `val_reward` does. A
        RewardManager is closed at the end of the run. `callbacks`: called after steps, validations and checkpoints.
        """
        self.config = config if isinstance(config, TrainConfig) else load_config(TrainConfig, config)
        inputs = read_inputs(self.config, RLHFDataset)
        self._inputs = inputs if tokenizer is None else replace(inputs, tokenizer=tokenizer)
        check_workers(workers or {})
        self._workers = workers
        self._pools = pools or pools_of(self.config)
        self._reward, self._val_reward = reward, val_reward
        self._callbacks = callbacks
        self._open = ExitStack()
        self._cluster: Cluster | None = None
        self._job: RlJob | None = None

    def init_workers(self) -> None:
        """Claim the run directory, start the processes, load the models. `fit` does it where nobody has."""
        with ExitStack() as opened:
            opened.enter_context(claim_run_dir(self.config))
            self._cluster = opened.enter_context(closing(make_cluster(self.config, self._pools)))
            self._reward = self._reward or make_reward_manager(self.config)
            for reward in (self._reward, self._val_reward):
                if isinstance(reward, RewardManager):
                    opened.enter_context(closing(reward))
            start = find_start(self.config, self.config.trainer.resume)
            self._job = self._make_job(start if isinstance(start, Fork) else None)
            self._open = opened.pop_all()

    def fit(self) -> Run:
        """Train to the last step, or until a signal or a callback stops the run (`stopped_by` of what it returns).

        Raises CallbackFailed where a callback does, besides what training raises.
        """
        if self._cluster is None:
            self.init_workers()
        with self._open:
            stopped_by = run_job(self.config, self._make_job, self._callbacks)
        return Run(self.config.trainer.run_dir, stopped_by)

    def _make_job(self, fork: Fork | None) -> RlJob:
        """The job that `init_workers` made; after workers were lost, a new one."""
        assert self._cluster is not None and self._reward is not None
        job, self._job = self._job, None
        placement = Placement(self._cluster, self._pools, self._workers)
        return job or RlJob(self.config, self._inputs, placement, self._reward, self._val_reward, fork)


def check_workers(workers: Mapping[Role, type[Worker[Any]]]) -> None:
    """Raises UserError where a class overrides what training does not call."""
    kind = workers.get(Role.Rollout, RolloutWorker)
    if not issubclass(kind, RolloutWorker) or kind.generate is RolloutWorker.generate:
        return
    if kind.answer is RolloutWorker.answer and kind.advance is RolloutWorker.advance:
        raise UserError(
            f"workers: {kind.__name__} overrides RolloutWorker.generate, which a Trainer does not call: it generates "
            "while other things go on; override `async def answer(self, request, sampling)` in its place, which makes "
            "the answers to one prompt, in training and validation"
        )


def train(config: TrainConfig | SftConfig | Path | str | Mapping[str, Any], callbacks: Sequence[Callback] = ()) -> Run:
    """Run the training that the configuration's type says; what it returns tells what has become of it.

    TrainConfig is reinforcement learning, SftConfig supervised fine-tuning, DpoConfig preferences, RewardModelConfig a
    reward model; a file, or a mapping as `load_config` takes it, is reinforcement learning. Raises UserError with every
    mistake in configuration and data before anything is started, and CallbackFailed where a callback does.
    """
    if isinstance(config, TrainConfig | Path | str | Mapping):
        return Trainer(config, callbacks=callbacks).fit()
    return Run(config.trainer.run_dir, _train_on_rows(config, callbacks))


def _train_on_rows(config: SftConfig, callbacks: Sequence[Callback]) -> StopReason | None:
    """What has no prompts to answer."""
    if isinstance(config, DpoConfig):
        answers: Inputs[Any] = read_inputs(config, dataset_of(config))
        with claim_run_dir(config):
            return preference.train_dpo(config, answers, callbacks)
    if isinstance(config, RewardModelConfig):
        pairs: Inputs[DemonstrationDataset[Preference]] = read_inputs(config, PreferenceDataset)
        with claim_run_dir(config):
            return preference.train_reward_model(config, pairs, callbacks)
    demonstrations: Inputs[DemonstrationDataset[Demonstration]] = read_inputs(config, SftDataset)
    with claim_run_dir(config):
        return sft.train(config, demonstrations, callbacks)
