"""Reinforcement learning as a job: roles from a configuration, one dataflow step a step."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from tandem.algorithms import Algorithm, make_algorithm
from tandem.algorithms.base import Signal
from tandem.config.tree import TrainConfig
from tandem.controller.dataflow import Roles, describe_batch, train_step
from tandem.controller.inputs import Inputs
from tandem.controller.validation import validate
from tandem.data.dataset import RLHFDataset
from tandem.data.sampler import Sampler
from tandem.files import write_text
from tandem.generation.native import NativeEngine
from tandem.models.loading import load_critic, load_policy, stop_token_ids
from tandem.reward.manager import RewardManager
from tandem.tracking.trajectories import trajectories_path, write_trajectories
from tandem.training.fsdp import FsdpEngine
from tandem.types import StepMetrics
from tandem.weights.sync import SharedWeights
from tandem.workers.critic import Critic
from tandem.workers.policy import Actor, Reference
from tandem.workers.rollout import RolloutWorker


class RlJob:
    """PPO, GRPO and their kin on one rank, every role an object of this process."""

    def __init__(self, config: TrainConfig, inputs: Inputs[RLHFDataset]) -> None:
        assert inputs.train is not None
        self._config = config
        self._inputs = inputs
        self._sampler = Sampler(
            len(inputs.train), config.data.prompts_per_step, config.data.shuffle, config.trainer.seed
        )
        trainer = config.trainer
        self.total_steps = trainer.steps or self._sampler.steps_for(trainer.epochs or 1)
        self._algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
        self._engines, self._roles = make_roles(config, inputs, self._algorithm, self.total_steps)

    def step(self, step: int) -> StepMetrics:
        config, train = self._config, self._inputs.train
        assert train is not None
        prompts = [train[row] for row in next(self._sampler)]
        done = train_step(self._roles, self._algorithm, prompts, config.algorithm.group_size, step)
        if config.trainer.trajectories_every and step % config.trainer.trajectories_every == 0:
            write_trajectories(trajectories_path(config.trainer.run_dir, step), step, done.groups, done.batch)
        self._roles.reward.check_share(done.groups)
        described = describe_batch(done.batch, config.generation.max_response_tokens, version=step - 1)
        return {**done.metrics, **described, "data/epoch": self._sampler.epoch}

    def evaluate(self, step: int) -> StepMetrics:
        val = self._inputs.val
        assert val is not None
        return validate(self._roles.rollout, self._roles.reward, val, step)

    def save(self, directory: Path) -> None:
        for name, engine in self._engines.items():
            target = directory / name
            target.mkdir(exist_ok=True)
            engine.save(target)
        self._inputs.tokenizer.save_pretrained(directory / "model")
        state = {"sampler": self._sampler.state(), "algorithm": self._algorithm.state()}
        write_text(directory / "state" / "rl.json", json.dumps(state))

    def load(self, directory: Path) -> None:
        for name, engine in self._engines.items():
            engine.load(directory / name)
        state = json.loads((directory / "state" / "rl.json").read_text(encoding="utf-8"))
        self._sampler.load_state(state["sampler"])
        self._algorithm.load_state(state["algorithm"])
        version = json.loads((directory / "state" / "run.json").read_text(encoding="utf-8"))["step"]
        self._roles.weights.publish(version)

    def close(self) -> None:
        self._roles.rollout.close()
        self._roles.reward.close()


def make_roles(
    config: TrainConfig, inputs: Inputs[RLHFDataset], algorithm: Algorithm, total_steps: int
) -> tuple[dict[str, FsdpEngine], Roles]:
    """The roles that the algorithm needs, and the engines to checkpoint by their place in a checkpoint."""
    training, temperature = config.training, config.generation.temperature
    optimizer_steps = total_steps * config.algorithm.epochs * config.algorithm.minibatches
    policy = load_policy(config.model)
    engines = {".": FsdpEngine(policy, training, training.optimizer, optimizer_steps, temperature)}
    reference = critic = None
    if Signal.REF_LOGPROBS in algorithm.needs:
        frozen = FsdpEngine(load_policy(config.model), training, None, temperature=temperature)
        reference = Reference(frozen, config)
    if Signal.VALUES in algorithm.needs:
        assert config.algorithm.type == "ppo"
        values = load_critic(config.model)
        engines["critic"] = FsdpEngine(values, training, config.algorithm.critic_optimizer, optimizer_steps)
        critic = Critic(engines["critic"], algorithm, config)
    rollout, weights = _make_rollout(config, inputs, policy)
    roles = Roles(
        rollout=rollout,
        reward=RewardManager(config.reward, config.trainer.seed),
        actor=Actor(engines["."], algorithm, config),
        reference=reference,
        critic=critic,
        weights=weights,
    )
    return engines, roles


def _make_rollout(
    config: TrainConfig, inputs: Inputs[RLHFDataset], policy: PreTrainedModel
) -> tuple[RolloutWorker, SharedWeights]:
    engine = NativeEngine(policy, max_running=config.generation.max_running, tokenizer=inputs.tokenizer)
    weights = SharedWeights(engine)
    weights.publish(0)
    stops = stop_token_ids(policy, inputs.tokenizer)
    return RolloutWorker(engine, inputs.tokenizer, config.generation, stops, config.trainer.seed), weights


def evaluate_model(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> StepMetrics:
    """`tandem eval`: answer and score `data.val_files` with `model.path`."""
    assert inputs.val is not None
    rollout, _ = _make_rollout(config, inputs, load_policy(config.model))
    reward = RewardManager(config.reward, config.trainer.seed)
    try:
        return validate(rollout, reward, inputs.val, step=0)
    finally:
        rollout.close()
        reward.close()
