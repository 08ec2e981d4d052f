"""Supervised fine-tuning as a job: the same engine, data module and run as reinforcement learning."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tandem.algorithms.supervised import NextTokenLoss
from tandem.batching.packing import demonstrations_to_batch, token_shares
from tandem.checkpoint.draft import Draft
from tandem.checkpoint.fork import POLICY, Fork
from tandem.cluster import make_cluster
from tandem.config.tree import SftConfig
from tandem.controller.assembly import pictures_of
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.roles import Actor, Trained
from tandem.data.mixture import sampler_of_epochs
from tandem.data.sft import DemonstrationDataset
from tandem.files import write_text
from tandem.jobs.callbacks import Callback
from tandem.jobs.inputs import Inputs, state_of_rows, tell_changed_rows
from tandem.jobs.run import run_job
from tandem.models.loading import save_processors
from tandem.signals import StopReason
from tandem.stored import read_json
from tandem.types import Batch, Demonstration, StepMetrics
from tandem.workers.training import TrainSpec, TrainWorker

Item = TypeVar("Item")
Model = TypeVar("Model", bound=Trained)


class SupervisedJob(ABC, Generic[Item, Model]):
    """Trains one model on rows of data, as many a step as `data.rows_per_step` says."""

    name: str
    """The kind of training: the first part of its metrics' names."""

    def __init__(
        self,
        config: SftConfig,
        inputs: Inputs[DemonstrationDataset[Item]],
        placement: Placement,
        fork: Fork | None = None,
    ) -> None:
        """`fork`: the checkpoint that the model starts from, in the place of `model.path`."""
        assert inputs.train is not None
        self._config = config
        self._inputs = inputs
        self._train = inputs.train
        trainer = config.trainer
        self._sampler = sampler_of_epochs(config.data, inputs.train, config.data.rows_per_step, trainer.seed)
        self.total_steps = trainer.steps or self._sampler.steps_for(trainer.epochs or 1)
        self.placement = placement
        start = fork.weights.get(POLICY, config.model.path) if fork else config.model.path
        model = config.model.model_copy(update={"path": start})
        self._model = self.make_model(
            TrainSpec(
                model,
                config.training,
                config.training.optimizer,
                total_steps=self.total_steps,
                pictures=pictures_of(config),
            )
        )
        if fork is not None:
            if POLICY in fork.states:
                self._model.load(fork.states[POLICY], new_schedule=True).get()
            print(fork.describe([POLICY]), flush=True)

    @abstractmethod
    def make_model(self, spec: TrainSpec) -> Model:
        """The workers of the model that is trained."""

    @abstractmethod
    def learn(self, rows: Sequence[Item]) -> tuple[Batch, StepMetrics]:
        """One optimizer step; metrics without their first part, those of the optimizer with the worker's name."""

    @abstractmethod
    def validation_metrics(self, rows: Sequence[Item]) -> StepMetrics:
        """The metrics of validation rows, without `val/`."""

    def step(self, step: int) -> StepMetrics:
        batch, learned = self.learn([self._train[row] for row in next(self._sampler)])
        metrics = {f"{self.name}/{name.rpartition('/')[2]}": value for name, value in learned.items()}
        tokens = len(batch.prompt_ids) + len(batch.response_ids)
        return {**metrics, "perf/tokens": float(tokens), **self._sampler.metrics()}

    def evaluate(self, step: int) -> StepMetrics:
        val = self._inputs.val
        assert val is not None
        metrics = self.validation_metrics([val[row] for row in range(len(val))])
        return {f"val/{name}": value for name, value in metrics.items()}

    def save(self, draft: Draft) -> None:
        self._model.save(draft)
        model = draft.directory / "model"
        draft.writes.append(partial(save_processors, self._inputs.tokenizer, self._config.model.path, model))
        state = {"sampler": self._sampler.state(), **state_of_rows(self._inputs)}
        write_text(draft.directory / "state" / "data.json", json.dumps(state))

    def load(self, directory: Path) -> None:
        self._model.load(directory).get()
        state = read_json(directory / "state" / "data.json", dict[str, Any])
        self._sampler.load_state(state["sampler"])
        tell_changed_rows(state, self._inputs)

    def close(self) -> None:
        self.placement.close()


class SftJob(SupervisedJob[Demonstration, Actor]):
    """Maximum likelihood of the demonstrations' answers, token mean over each step."""

    name = "sft"

    def make_model(self, spec: TrainSpec) -> Actor:
        """A policy."""
        return self.placement.group(Role.Actor, Actor, TrainWorker, spec)

    def learn(self, rows: Sequence[Demonstration]) -> tuple[Batch, StepMetrics]:
        batch = demonstrations_to_batch(rows)
        batch.tokens.loss_weights = batch.tokens.shares = token_shares(batch.loss_mask)
        return batch, self._model.learn(batch, NextTokenLoss()).get()[0]

    def validation_metrics(self, rows: Sequence[Demonstration]) -> StepMetrics:
        """Mean negative log-likelihood of the answers' tokens."""
        batch = demonstrations_to_batch(rows)
        logprobs = self._model.logprobs(batch).get()
        return {"loss": -float(logprobs[batch.loss_mask].mean(dtype=np.float64))}


def train(
    config: SftConfig, inputs: Inputs[DemonstrationDataset[Demonstration]], callbacks: Sequence[Callback] = ()
) -> StopReason | None:
    """`tandem sft`: what stopped the run before its last step, if anything did."""
    with closing(make_cluster(config)) as cluster:

        def make_job(fork: Fork | None) -> SftJob:
            return SftJob(config, inputs, Placement(cluster, pools_of(config)), fork)

        return run_job(config, make_job, callbacks)
