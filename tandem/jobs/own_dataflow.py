"""For a dataflow of your own: the data, engines, rewards and models of a configuration, and a loop that is yours."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Self

from tandem.checkpoint.fork import special_optimizers
from tandem.checkpoint.progress import Progress
from tandem.checkpoint.remote import RemoteCheckpoints
from tandem.checkpoint.store import CheckpointStore
from tandem.cluster import make_cluster
from tandem.config.generation import default_memory_share
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import actor_spec, connect, make_rollout
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.roles import Actor, Rollout
from tandem.data.dataset import RLHFDataset
from tandem.data.mixture import make_sampler
from tandem.errors import UserError
from tandem.jobs.best_checkpoint import BestValue
from tandem.jobs.inputs import read_inputs
from tandem.jobs.run import claim_run_dir
from tandem.models.loading import save_processors
from tandem.reward.manager import RewardManager
from tandem.types import Prompt
from tandem.workers.training import TrainWorker


class Dataflow:
    """A context: `with Dataflow(config) as flow` claims `trainer.run_dir`, starts the workers of `cluster` and
    `placement`, and ends them.

    The rollout serves version 0, the weights of `model.path`. For the reference, a critic or workers of your own there
    is `placement.group`. Nothing is written to the run directory but what `save` writes.
    """

    prompts: Iterator[Sequence[Prompt]]
    """`data.prompts_per_step` prompts of `data.train_files`, each prompt once an epoch, for ever."""
    rollout: Rollout
    """Answers them."""
    reward: RewardManager
    """Scores the answers."""
    actor: Actor
    """Learns."""
    placement: Placement
    """Where further worker groups are made."""
    total_steps: int
    """What `trainer.steps` or `trainer.epochs` come to; the actor's learning-rate schedule is over so many updates."""

    def __init__(self, config: TrainConfig) -> None:
        """Read configuration and data; UserError with every mistake in them. Nothing is started yet."""
        _refuse_what_loops_do(config)
        self.config = config
        self._inputs = read_inputs(config, RLHFDataset)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        config, inputs = self.config, self._inputs
        assert inputs.train is not None
        train, trainer = inputs.train, config.trainer
        sampler = make_sampler(config.data, train, trainer.seed)
        self.total_steps = trainer.steps or sampler.steps_for(trainer.epochs or 1)
        self.prompts = ([train[row] for row in rows] for rows in sampler)
        with ExitStack() as opened:
            opened.enter_context(claim_run_dir(config))
            cluster = opened.enter_context(closing(make_cluster(config)))
            self.reward = opened.enter_context(closing(RewardManager(config.reward, trainer.seed)))
            self.placement = Placement(cluster, pools_of(config))
            self.actor = self.placement.group(Role.Actor, Actor, TrainWorker, actor_spec(config, self.total_steps))
            # Nobody here knows when a loop of the user's own generates and when it trains: both keep their memory.
            share = default_memory_share(self.placement.together(Role.Actor, Role.Rollout), takes_turns=False)
            self.rollout = make_rollout(config, inputs.tokenizer, self.placement, share)
            self._publish = connect(self.actor, self.rollout, self.placement)
            self.publish(0)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def publish(self, version: int) -> None:
        """Make the rollout serve the actor's present weights as `version`, larger than every version before."""
        self._publish(version)

    def save(self, step: int) -> None:
        """Write the actor and its optimizer as the checkpoint of `step` in `trainer.run_dir`, which from then on stands
        for a model wherever one is named; older ones go as `trainer.keep_last` says."""
        trainer = self.config.trainer
        kinds = self.config.training.type, BestValue(trainer).state(), special_optimizers(self.config)
        progress = Progress(step, self.total_steps, *kinds)
        remote = RemoteCheckpoints(trainer.checkpoint_url) if trainer.checkpoint_url else None
        store = CheckpointStore(trainer.run_dir, trainer.keep_last, remote=remote)
        with store.write(step) as draft:
            self.actor.save(draft)
            save_processors(self._inputs.tokenizer, self.config.model.path, draft.directory / "model")
            progress.write(draft.directory)
        store.finish()


def _refuse_what_loops_do(config: TrainConfig) -> None:
    """Raises UserError for keys that ask for what the loop of `tandem train` does, and nobody would do here."""
    trainer = config.trainer
    if trainer.resume or trainer.branch_from:
        key = "resume" if trainer.resume else "branch_from"
        mend = "to go on from a run's weights, give that run as model.path, and another trainer.run_dir"
        raise UserError(f"trainer.{key}: a dataflow of your own always starts at its first step; {mend}")
    if trainer.max_staleness:
        mend = "leave it out, and ask for the answers of later steps before the actor learns (docs/python.md)"
        raise UserError(f"trainer.max_staleness: in a dataflow of your own the loop says what is asked when; {mend}")
    if config.data.sampler.type != "epochs":
        mend = "leave it out, and draw rows yourself"
        raise UserError(f"data.sampler: in a dataflow of your own nobody tells it what became of its draws; {mend}")
    if config.model.judge_path or config.reward.judge:
        mend = "leave it out, and ask a model with placement.group(Role.Judge, Rollout, …)"
        raise UserError(f"reward.judge: a dataflow of your own is scored by functions alone; {mend}")
    if config.model.teacher_path or config.algorithm.served_teacher:
        key = "model.teacher_path" if config.model.teacher_path else "algorithm.teacher"
        mend = "leave it out, and make one with placement.group(Role.Teacher, Policy, …)"
        raise UserError(f"{key}: a dataflow of your own says itself which models there are; {mend}")
    if config.model.reward_model_path:
        mend = "leave it out, and make a reward model with placement.group(Role.RewardModel, ValueModel, …)"
        raise UserError(f"model.reward_model_path: a dataflow of your own is scored by functions alone; {mend}")
