"""Supervised fine-tuning as a job: the same engine, data module and run as reinforcement learning."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from tandem.algorithms.losses import NextTokenLoss
from tandem.batching.packing import demonstrations_to_batch
from tandem.cluster import make_cluster
from tandem.config.tree import SftConfig
from tandem.controller.learning import token_shares
from tandem.controller.pools import Role
from tandem.controller.roles import Placement, pools_of
from tandem.data.sampler import Sampler
from tandem.data.sft import SftDataset
from tandem.files import write_text
from tandem.jobs.inputs import Inputs
from tandem.jobs.run import run_job
from tandem.types import StepMetrics
from tandem.workers.training import TrainWorker


class SftJob:
    """Maximum likelihood of the demonstrations' answers, token mean over each step."""

    def __init__(self, config: SftConfig, inputs: Inputs[SftDataset], placement: Placement) -> None:
        assert inputs.train is not None
        self._config = config
        self._inputs = inputs
        self._train = inputs.train
        trainer = config.trainer
        self._sampler = Sampler(len(inputs.train), config.data.rows_per_step, config.data.shuffle, trainer.seed)
        self.total_steps = trainer.steps or self._sampler.steps_for(trainer.epochs or 1)
        self.placement = placement
        self._actor = placement.group(
            Role.Actor, TrainWorker, config.model, config.training, config.training.optimizer, self.total_steps
        )

    def step(self, step: int) -> StepMetrics:
        batch = demonstrations_to_batch([self._train[row] for row in next(self._sampler)])
        batch.tokens.weights = batch.tokens.shares = token_shares(batch.loss_mask)
        learned, _ = self._actor.learn(batch, NextTokenLoss()).get()
        metrics = {name.replace("actor/", "sft/"): value for name, value in learned.items()}
        tokens = len(batch.prompt_ids) + len(batch.response_ids)
        return {**metrics, "perf/tokens": float(tokens), "data/epoch": self._sampler.epoch}

    def evaluate(self, step: int) -> StepMetrics:
        """Mean negative log-likelihood of the validation answers' tokens."""
        val = self._inputs.val
        assert val is not None
        batch = demonstrations_to_batch([val[row] for row in range(len(val))])
        logprobs = self._actor.logprobs(batch).get()
        return {"val/loss": -float(logprobs[batch.loss_mask].mean(dtype=np.float64))}

    def save(self, directory: Path) -> None:
        self._actor.save(directory).get()
        self._inputs.tokenizer.save_pretrained(directory / "model")
        write_text(directory / "state" / "sft.json", json.dumps({"sampler": self._sampler.state()}))

    def load(self, directory: Path) -> None:
        self._actor.load(directory).get()
        state = json.loads((directory / "state" / "sft.json").read_text(encoding="utf-8"))
        self._sampler.load_state(state["sampler"])

    def close(self) -> None:
        self.placement.close()


def train(config: SftConfig, inputs: Inputs[SftDataset]) -> bool:
    """`tandem sft`: True when the run reached its last step."""
    with closing(make_cluster(config)) as cluster:
        return run_job(config, lambda: SftJob(config, inputs, Placement(cluster, pools_of(config))))
