"""Half a run at a time: only the rollout, or only the training on trajectories that were saved."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tandem.algorithms import make_algorithm
from tandem.algorithms.base import Need
from tandem.batching.packing import to_batch
from tandem.cluster import make_cluster
from tandem.config.rules.algorithm import find_stale_mistakes
from tandem.config.stored_run import pictures_of_run
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import make_experience_roles, make_producer, pictures_of
from tandem.controller.dataflow import StepResult, describe_batch, learn_step
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.data.mixture import make_sampler
from tandem.errors import UserError
from tandem.jobs.inputs import Inputs, require_rows_of_ids
from tandem.jobs.rl import RlJob, failed_answers_saved, make_reward_manager
from tandem.jobs.room import RoomWatch
from tandem.jobs.run import run_job
from tandem.pictures.store import PictureStore
from tandem.reward.manager import metrics as reward_metrics
from tandem.rollout.metrics import metrics as conversation_metrics
from tandem.signals import StopReason
from tandem.tracking.console import ConsoleRecorder
from tandem.tracking.jsonl import JsonlRecorder
from tandem.tracking.trajectories import largest_id_of, read_groups, staleness_of, trajectories_path, write_trajectories


def debug_rollout(config: TrainConfig, inputs: Inputs[RLHFDataset]) -> None:
    """Generate, score and save the trajectories of every step with the model as it is; nothing is trained."""
    train, trainer = inputs.train, config.trainer.model_copy(update={"max_staleness": 0})
    config = config.model_copy(update={"trainer": trainer})
    assert train is not None
    sampler = make_sampler(config.data, train, trainer.seed)
    steps = trainer.steps or sampler.steps_for(trainer.epochs or 1)
    room = RoomWatch()
    trackers = (JsonlRecorder(trainer.run_dir / "metrics.jsonl"), ConsoleRecorder(steps, 0))
    with closing(make_cluster(config)) as cluster, closing(make_reward_manager(config)) as reward:
        placement = Placement(cluster, pools_of(config))
        placement.sources.append(reward)
        roles = make_experience_roles(config, inputs.tokenizer, placement, reward)
        rollouts = make_producer(config, roles, placement, lambda draw: train[sampler.row(draw)], steps)
        for step in range(1, steps + 1):
            with failed_answers_saved(config, step):
                groups = rollouts.take(step)
            rollouts.resume(step, rollouts.cursor, {})  # no publish lets the next draws in: nothing is trained
            batch = to_batch(groups)
            write_trajectories(trajectories_path(trainer.run_dir, step), step, groups, batch)
            room.note(groups, f"step {step}")
            described = describe_batch(batch, config, version=0)
            for tracker in trackers:
                counted = {**reward_metrics(groups), **conversation_metrics(groups)}
                tracker.log(step, {**counted, **rollouts.metrics(), **described})
    for tracker in trackers:
        tracker.close("finished")
    room.check()


class ReplayJob(RlJob):
    """Trains on saved trajectories, a file a step; nothing is generated."""

    def __init__(self, files: Sequence[Path], *args: Any) -> None:
        super().__init__(*args)
        self._files = files
        self.total_steps = len(files)

    def _advance(self, step: int) -> StepResult:
        groups = read_groups(self._files[step - 1], step)
        if (directory := pictures_of(self._config)) is not None:
            rows = (row for group in groups for one in group.trajectories for row in one.every_branch)
            keys = {picture.key for row in rows for picture in row.pictures}
            # What tools and worlds have shown is only where it was shown; data rows are stored anew.
            run_dir = self._files[step - 1].parent.parent
            PictureStore(directory).bring(keys, PictureStore(pictures_of_run(run_dir)))
        self._roles.experience.reward.check_share(groups)
        return learn_step(self._roles, self._algorithm, self._config, groups, step, self._roles.experience.devices)


def debug_train(config: TrainConfig, inputs: Inputs[RLHFDataset], saved: Path) -> StopReason | None:
    """Train on `saved`: a file of trajectories, or a folder of such, in the order of their names."""
    files = sorted(saved.glob("*.parquet")) if saved.is_dir() else [saved]
    if not files or not files[0].is_file():
        raise UserError(f"--debug-train {saved}: holds no trajectories; give RUN/trajectories or a file of it")
    if Need.GREEDY_REWARDS in make_algorithm(config.algorithm, config.generation.max_response_tokens).needs:
        raise UserError(
            f"--debug-train: algorithm.type: {config.algorithm.type} needs the rewards of greedy answers, which files "
            "of trajectories do not hold; train without it"
        )
    for file in files:
        require_rows_of_ids(config.model, inputs.tokenizer, largest_id_of(file), f"--debug-train {file}")
    trained = config.trainer.model_copy(update={"eval_every": 0, "max_staleness": _staleness(files, config, saved)})
    config = config.model_copy(update={"trainer": trained})
    with closing(make_cluster(config)) as cluster, closing(make_reward_manager(config)) as reward:
        placement = Placement(cluster, pools_of(config))
        return run_job(config, lambda fork: ReplayJob(files, config, inputs, placement, reward, None, fork))


def _staleness(files: Sequence[Path], config: TrainConfig, saved: Path) -> int:
    """`trainer.max_staleness`, or that of the files where it is more: after `--debug-rollout` one model has answered
    for all steps. Raises UserError where the algorithm has nothing that corrects for that."""
    configured, most = config.trainer.max_staleness, max(staleness_of(path) for path in files)
    if most <= configured:
        return configured
    if mistakes := list(find_stale_mistakes(config.algorithm, most)):
        raise UserError(
            f"--debug-train {saved}: answers are of weights up to {most} steps older than those of their step. "
            f"algorithm: {'; '.join(mistakes)}; or give a single file of step 1"
        )
    print(
        f"--debug-train {saved}: answers are of weights up to {most} steps older than those of their step; they are "
        f"trained on as with trainer.max_staleness: {most}",
        flush=True,
    )
    return most
