"""How long a run is, when it validates and saves, and what it goes on from."""

from collections.abc import Iterator
from typing import Literal

from tandem.config.base import MayChange, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, rule
from tandem.config.paths import CheckpointPath, LocalPath


class TrainerConfig(Section):
    run_dir: MayChange[LocalPath]
    steps: MayChange[PositiveInt | None] = None
    epochs: MayChange[PositiveInt | None] = None
    seed: NonNegativeInt = 0
    max_staleness: NonNegativeInt = 0
    """`tandem train`: the most policy versions between making a token and training on it. 0: a step's answers are made
    by the weights that it trains; k: generation runs up to k steps ahead of training, and no token is older."""
    eval_every: MayChange[NonNegativeInt] = 0
    """Steps between validations, and one before the first step; 0: never."""
    save_every: MayChange[NonNegativeInt] = 0
    """Steps between checkpoints; 0: no such rule. The last step is always saved."""
    save_every_s: MayChange[NonNegativeFloat] = 1800.0
    """A step that ends so long after the last checkpoint is saved, too: what a lost run costs at most. 0: no such rule.
    """
    save_rollouts: MayChange[bool] = True
    """With `max_staleness`, checkpoints hold the answers that were made ahead of training, with their scores: a resumed
    run need not make them again, and with `generation.partial_rollouts: false` it ends bit for bit as the undisturbed
    one. Where it is false on a resume, those that the checkpoint holds are made and scored anew."""
    keep_last: MayChange[PositiveInt] = 2
    """Checkpoints that stay; the best one stays besides."""
    checkpoint_url: MayChange[str | None] = None
    """Where each checkpoint is copied when it is complete, by what fsspec has a file system for, as `s3://bucket/run`;
    `keep_last` and the best one count there, too. `--resume URL` fetches the newest one, verifies it and goes on."""
    best_metric: MayChange[str | None] = None
    """A metric name: the checkpoint where it was best is kept as `best`."""
    best_mode: MayChange[Literal["max", "min"] | None] = None
    """Whether its highest or its lowest value is best. Default: the lowest of a loss, a KL or a count of failures, the
    highest of anything else."""
    trajectories_every: MayChange[NonNegativeInt] = 1
    """Steps between trajectory files; 0: none."""
    keep_trajectories: MayChange[NonNegativeInt] = 100
    """Trajectory files that stay, the newest ones, and as many of validation answers; 0: all."""
    keep_trajectories_gib: MayChange[NonNegativeFloat] = 20.0
    """GiB that trajectory files take together, and as much those of validation answers: the oldest go first, and the
    newest one stays however large it is; 0: no such rule."""
    resume: MayChange[bool] = False
    """Continue the run in `run_dir` from its last checkpoint; without one there, start."""
    branch_from: CheckpointPath | None = None
    """A run, or one of its checkpoints: this new run starts with the weights and optimizers that it holds, whatever
    else differs. With another `training.type` or type of optimizer, adapters on one side only, or as a reward model
    that begins as a policy, with the weights alone."""
    max_restarts: MayChange[NonNegativeInt] = 3
    """How often in a row the run goes on from its last checkpoint by itself after workers died or hung. Who gets beyond
    the step at which they were lost before has as many again. 0: it ends, and is resumed by hand."""

    @rule()
    def _one_length(self) -> Iterator[str]:
        if (self.steps is None) == (self.epochs is None):
            yield "give exactly one of steps and epochs"

    @rule()
    def _mode_of_a_metric(self) -> Iterator[str]:
        if self.best_mode and not self.best_metric:
            yield f"best_mode: {self.best_mode}, but there is no best_metric; give one, or leave it out"
