"""Reinforcement learning: roles from a configuration, one dataflow step a step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tandem.activity import Shown, show
from tandem.algorithms import make_algorithm
from tandem.batching.packing import to_batch
from tandem.checkpoint.draft import Draft
from tandem.checkpoint.fork import Fork
from tandem.checkpoint.progress import Progress
from tandem.checkpoint.saved_rollouts import read_rollouts, write_rollouts
from tandem.cluster import make_cluster
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import make_producer, make_roles
from tandem.controller.dataflow import StepResult, describe_batch, train_step
from tandem.controller.learning import mismatch_warning, warms_up, why_nothing_was_learned
from tandem.controller.placement import Placement, pools_of
from tandem.controller.reward_model import Rewards, scores_groups
from tandem.controller.roles import MovingReference
from tandem.data.dataset import RLHFDataset
from tandem.data.learning_sampler import LearningSampler, Outcome
from tandem.data.mixture import make_sampler
from tandem.data.sampler import Sampler
from tandem.errors import RewardShareExceeded, WorkerLost
from tandem.evaluation.answered import answered_of, without_accuracy
from tandem.files import write_text
from tandem.jobs.inputs import Inputs, state_of_rows, tell_changed_rows
from tandem.jobs.room import RoomWatch, has_no_room
from tandem.jobs.run import run_job
from tandem.jobs.validation import ValidationSets, summarize, validate
from tandem.models.loading import save_processors
from tandem.reward.manager import RewardManager
from tandem.signals import StopReason
from tandem.stored import read_json
from tandem.tracking.trajectories import FolderLimit, trajectories_path, validation_path, write_trajectories
from tandem.types import Batch, Group, Prompt, StepMetrics


class RlJob:
    """PPO, GRPO and their kin. The job closes its placement; the rewards are the caller's."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs[RLHFDataset],
        placement: Placement,
        reward: Rewards,
        val_reward: Rewards | None = None,
        fork: Fork | None = None,
    ) -> None:
        assert inputs.train is not None
        self._config = config
        self._inputs = inputs
        self._train = inputs.train
        self._val_sets = None if inputs.val is None else ValidationSets(inputs.val, config)
        trainer = config.trainer
        self._kept = FolderLimit(trainer.keep_trajectories, trainer.keep_trajectories_gib)
        self._sampler = make_sampler(config.data, inputs.train, trainer.seed)
        self.total_steps = trainer.steps or self._sampler.steps_for(trainer.epochs or 1)
        self._algorithm = make_algorithm(config.algorithm, config.generation.max_response_tokens)
        self.placement = placement
        steps = self.total_steps
        try:
            self._roles = make_roles(config, inputs.tokenizer, self._algorithm, steps, placement, reward, fork)
            experience = self._roles.experience
            self._rollouts = make_producer(config, experience, placement, self._prompt_of, steps, self._algorithm.needs)
        except BaseException:
            placement.close()
            raise
        if fork is not None:
            print(fork.describe(self._roles.trained), flush=True)
        self._val_reward = val_reward
        self._warned = self._answers_lost = False
        self._told_of_rest: set[str] = set()
        """Reasons for which a step has taught nothing, of which the user knows."""
        self._told_of_accuracy: set[str] = set()
        """Sources without accuracy, of which the user knows."""
        self._room = RoomWatch()
        self._reward = reward
        if scores_groups(reward):
            placement.sources.append(reward)

    def step(self, step: int) -> StepMetrics:
        with failed_answers_saved(self._config, step):
            done = self._advance(step)
        first = done.groups[0]
        show(Shown(first.trajectories[0].prompt.text, first.trajectories[0].text, first.scores[0].value))
        config, trainer = self._config, self._config.trainer
        if trainer.trajectories_every and step % trainer.trajectories_every == 0:
            path = trajectories_path(trainer.run_dir, step)
            write_trajectories(path, step, done.groups, done.batch, self._kept)
        self._room.note(done.groups, f"step {step}")
        self._room.check(rows=1 if step == self.total_steps else len(self._train))
        self._warn_of_mismatch(done.batch, step)
        self._tell_nothing_learned(step, done)
        described = describe_batch(done.batch, config, version=step - 1)
        of_sets = mixture_rewards(done.groups, self._sampler)
        return {**done.metrics, **described, **self._sampler.metrics(), **of_sets}

    def _tell_nothing_learned(self, step: int, done: StepResult) -> None:
        """Once a run for each reason, that a step has taught nothing."""
        if done.metrics["actor/trained_share"] > 0 or warms_up(self._config, step):
            return
        answers = [answer for group in done.groups for answer in group.trajectories]
        why = "no conversation has room for an answer (conversation/without_room)"
        if not all(map(has_no_room, answers)):
            why = why_nothing_was_learned(done.batch, self._algorithm, self._config, done.left_out_B)
        if why not in self._told_of_rest:
            print(f"step {step}: nothing was learned, for {why} (actor/trained_share is 0; told once)", flush=True)
            self._told_of_rest.add(why)

    def _warn_of_mismatch(self, batch: Batch, step: int) -> None:
        """Once a run, where the loss is anchored at the log-probs of an engine that is far from the trainer."""
        warning = None if self._warned else mismatch_warning(batch, self._config, version=step - 1)
        if warning is not None:
            print(warning, flush=True)
            self._warned = True

    def _advance(self, step: int) -> StepResult:
        """One step of the dataflow."""
        before = self._rollouts.cursor
        try:
            done = train_step(self._roles, self._algorithm, self._config, self._rollouts, step)
        except WorkerLost as lost:
            lost.trainer_is_whole = self._rollouts.cursor == before  # it still waited for answers
            self._rollouts.close()
            self._answers_lost = True
            raise
        self._sampler.cursor = self._rollouts.cursor
        if isinstance(self._sampler, LearningSampler):
            self._sampler.update([_outcome(group) for _, group in sorted(self._rollouts.decided.items())])
        return done

    def evaluate(self, step: int) -> StepMetrics:
        val, sets = self._inputs.val, self._val_sets
        assert val is not None and sets is not None
        roles, trainer = self._roles.experience, self._config.trainer
        if self._val_reward is not None:
            roles = replace(roles, reward=self._val_reward)
        self._rollouts.settle()
        path = validation_path(trainer.run_dir, step)
        try:
            groups = validate(roles, val, sets, trainer.seed, step)
        except RewardShareExceeded as error:
            write_trajectories(path, step, list(error.groups), to_batch(error.groups), self._kept)
            raise
        check_versions(groups, step)
        write_trajectories(path, step, groups, to_batch(groups), self._kept)
        self._room.note(groups, f"validation of step {step}", counts=False)
        roles.reward.check_share(groups)
        self._tell_of_accuracy(step, without_accuracy(answered_of(groups, sets.label)))
        return summarize(groups, sets.label)

    def _tell_of_accuracy(self, step: int, lacking: Mapping[str, tuple[int, int]]) -> None:
        """Once a run for each source of validation rows, that some answers to them have no `acc`."""
        for source, (without, scored) in lacking.items():
            if source not in self._told_of_accuracy:
                self._told_of_accuracy.add(source)
                print(
                    f"validation of step {step}: {without:,} of {scored:,} scored answers to {source} have no acc, so "
                    f"there is no val/{source}/acc/mean@N; let the reward function return acc for each (told once)",
                    flush=True,
                )

    def save(self, draft: Draft) -> None:
        for name, group in self._roles.trained.items():
            group.save(draft, name)
        if isinstance(self._roles.reference, MovingReference):
            self._roles.reference.save(draft)
        directory = draft.directory
        draft.writes.append(
            partial(save_processors, self._inputs.tokenizer, self._config.model.path, directory / "model")
        )
        state = {"sampler": self._sampler.state(), "algorithm": self._algorithm.state(), "room": self._room.state()}
        write_text(directory / "state" / "rl.json", json.dumps(state | state_of_rows(self._inputs)))
        if self._config.trainer.max_staleness and self._config.trainer.save_rollouts and not self._answers_lost:
            draft.writes.append(partial(write_rollouts, directory, self._rollouts.finished()))

    def load(self, directory: Path) -> None:
        self._roles.experience.devices.to_preparation()
        for name, group in self._roles.trained.items():
            group.load(directory / name).get()
        if isinstance(self._roles.reference, MovingReference):
            self._roles.reference.load(directory)
        state = read_json(directory / "state" / "rl.json", dict[str, Any])
        self._sampler.load_state(state["sampler"])
        tell_changed_rows(state, self._inputs)
        self._room.load_state(state.get("room", {}))
        self._algorithm.load_state(state["algorithm"])
        step = Progress.read(directory).step
        self._roles.publish(step)
        kept = read_rollouts(directory, self._prompt_of) if self._config.trainer.save_rollouts else {}
        self._rollouts.resume(step, self._sampler.cursor, kept)

    def _prompt_of(self, draw: int) -> Prompt:
        return self._train[self._sampler.row(draw)]

    def close(self) -> None:
        self._rollouts.close()
        if scores_groups(self._reward):
            self._reward.forget()
            self.placement.sources.remove(self._reward)
        self.placement.close()


def check_versions(groups: list[Group], version: int) -> None:
    """Assert that the weights of this version made every token of these answers."""
    for group in groups:
        for answer in group.trajectories:
            made = (branch.versions[branch.loss_mask] for branch in answer.every_branch)
            others = set(np.concatenate([*made]).tolist()) - {version}
            assert not others, (
                f"validation of version {version}: row {answer.prompt.index}, sample {answer.sample} has tokens of "
                f"versions {sorted(others)}"
            )


def _outcome(group: Group) -> Outcome:
    scored = [score for score in group.scores if score.value is not None]
    accuracies = tuple(score.parts["acc"] for score in scored if "acc" in score.parts)
    rewards = tuple(score.value for score in scored if score.value is not None)
    return Outcome(group.trajectories[0].prompt.index, rewards, accuracies if len(accuracies) == len(scored) else ())


def mixture_rewards(groups: Sequence[Group], sampler: Sampler) -> StepMetrics:
    """Of each set of a mixture: the mean reward of a step's answers, where it has scored ones."""
    rewards: dict[str, list[float]] = {name: [] for name in sampler.epochs}
    for group in groups:
        name = sampler.set_of(group.trajectories[0].prompt.index)
        if name is not None:
            rewards[name] += [score.value for score in group.scores if score.value is not None]
    return {f"mixture/{name}/reward": fmean(values) for name, values in rewards.items() if values}


@contextmanager
def failed_answers_saved(config: TrainConfig, step: int) -> Iterator[None]:
    """Where too many rewards fail, and the run stops, the step's trajectories are written all the same."""
    try:
        yield
    except RewardShareExceeded as error:
        path = trajectories_path(config.trainer.run_dir, step)
        write_trajectories(path, step, list(error.groups), to_batch(error.groups))
        print(f"the answers whose rewards failed, and why, are in {path}", flush=True)
        raise


def make_reward_manager(config: TrainConfig) -> RewardManager:
    """Raises UserError when a function cannot be loaded."""
    return RewardManager(config.reward, config.trainer.seed, needed=config.algorithm.reads_rewards)


def train(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> StopReason | None:
    """`tandem train`: what stopped the run before its last step, if one did."""
    with closing(make_cluster(config)) as cluster, closing(make_reward_manager(config)) as reward:

        def make_job(fork: Fork | None) -> RlJob:
            return RlJob(config, inputs, Placement(cluster, pools_of(config)), reward, fork=fork)

        return run_job(config, make_job)
