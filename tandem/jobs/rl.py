"""Reinforcement learning as a job: roles from a configuration, one dataflow step a step."""

import json
from pathlib import Path

from tandem.algorithms import make_algorithm
from tandem.config.tree import TrainConfig
from tandem.controller.dataflow import describe_batch, train_step
from tandem.controller.groups import Cluster
from tandem.controller.roles import Placement, make_roles, make_rollout, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.data.sampler import Sampler
from tandem.files import write_text
from tandem.jobs.inputs import Inputs
from tandem.jobs.validation import validate
from tandem.reward.manager import RewardManager
from tandem.tracking.trajectories import trajectories_path, write_trajectories
from tandem.types import StepMetrics


class RlJob:
    """PPO, GRPO and their kin."""

    def __init__(self, config: TrainConfig, inputs: Inputs[RLHFDataset], cluster: Cluster) -> None:
        assert inputs.train is not None
        self._config = config
        self._inputs = inputs
        self._sampler = Sampler(
            len(inputs.train), config.data.prompts_per_step, config.data.shuffle, config.trainer.seed
        )
        trainer = config.trainer
        self.total_steps = trainer.steps or self._sampler.steps_for(trainer.epochs or 1)
        self._algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
        placement = Placement(cluster, pools_of(config))
        try:
            self._roles = make_roles(config, inputs.tokenizer, self._algorithm, self.total_steps, placement)
        except BaseException:
            placement.close()
            raise

    def step(self, step: int) -> StepMetrics:
        config, train = self._config, self._inputs.train
        assert train is not None
        prompts = [train[row] for row in next(self._sampler)]
        done = train_step(self._roles, self._algorithm, config, prompts, step)
        if config.trainer.trajectories_every and step % config.trainer.trajectories_every == 0:
            write_trajectories(trajectories_path(config.trainer.run_dir, step), step, done.groups, done.batch)
        self._roles.reward.check_share(done.groups)
        described = describe_batch(done.batch, config.generation.max_response_tokens, version=step - 1)
        return {**done.metrics, **described, "data/epoch": self._sampler.epoch}

    def evaluate(self, step: int) -> StepMetrics:
        val = self._inputs.val
        assert val is not None
        return validate(self._roles.rollout, self._roles.reward, val, self._config, step)

    def save(self, directory: Path) -> None:
        for name, group in self._roles.trained.items():
            target = directory / name
            target.mkdir(exist_ok=True)
            group.save(target).get()
        self._inputs.tokenizer.save_pretrained(directory / "model")
        state = {"sampler": self._sampler.state(), "algorithm": self._algorithm.state()}
        write_text(directory / "state" / "rl.json", json.dumps(state))

    def load(self, directory: Path) -> None:
        for name, group in self._roles.trained.items():
            group.load(directory / name).get()
        state = json.loads((directory / "state" / "rl.json").read_text(encoding="utf-8"))
        self._sampler.load_state(state["sampler"])
        self._algorithm.load_state(state["algorithm"])
        version = json.loads((directory / "state" / "run.json").read_text(encoding="utf-8"))["step"]
        self._roles.publish(version)

    def close(self) -> None:
        self._roles.close()


def evaluate_model(config: TrainConfig, inputs: Inputs[RLHFDataset], cluster: Cluster) -> StepMetrics:
    """`tandem eval`: answer and score `data.val_files` with `model.path`."""
    assert inputs.val is not None
    placement = Placement(cluster, pools_of(config))
    reward = RewardManager(config.reward, config.trainer.seed)
    try:
        rollout = make_rollout(config, inputs.tokenizer, placement)
        rollout.publish(0).get()
        return validate(rollout, reward, inputs.val, config, step=0)
    finally:
        placement.close()
        reward.close()
