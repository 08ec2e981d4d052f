"""`tandem eval`: answers of a model, their scores, and what these say of it."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tandem.batching.packing import to_batch
from tandem.cluster import make_cluster
from tandem.config.tree import EvalConfig
from tandem.controller.assembly import make_experience_roles
from tandem.controller.placement import Placement, pools_of
from tandem.data.dataset import RLHFDataset
from tandem.errors import RewardShareExceeded
from tandem.evaluation.answered import answered_of, check_same_prompts, without_accuracy
from tandem.evaluation.summary import Json, summarize, summarize_pair
from tandem.jobs.inputs import Inputs
from tandem.jobs.room import RoomWatch
from tandem.jobs.validation import ValidationSets, validate
from tandem.jobs.validation import summarize as metrics_of
from tandem.reward.manager import RewardManager
from tandem.tracking.trajectories import read_groups, write_trajectories
from tandem.types import Group, StepMetrics


class Evaluation(NamedTuple):
    metrics: StepMetrics
    data: Json
    """Of each data source of each set, as `evaluation.summary.summarize` says."""
    against: Json
    """As `summarize_pair` says; empty where nothing was compared with."""
    lacking: Mapping[str, tuple[int, int]]
    """Of the answers that were compared with, as `without_accuracy` says."""


def evaluate_model(
    config: EvalConfig, inputs: Inputs[RLHFDataset], answers: Path | None = None, against: Path | None = None
) -> Evaluation:
    """Answer and score `data.val_files` and `data.val_sets` with `model.path`.

    `answers`: a parquet file to write them to; `against`: one of another evaluation, to compare with. UserError where
    that one is of other prompts.
    """
    assert inputs.val is not None
    saved = None if against is None else _read_answers(against, inputs.val)
    sets = ValidationSets(inputs.val, config)
    with closing(make_cluster(config)) as cluster, closing(RewardManager(config.reward, config.seed)) as reward:
        roles = make_experience_roles(config, inputs.tokenizer, Placement(cluster, pools_of(config)), reward)
        try:
            groups = validate(roles, inputs.val, sets, config.seed, step=0)
        except RewardShareExceeded as error:
            if answers is not None:
                write_trajectories(answers, 0, list(error.groups), to_batch(error.groups))
            raise
        if answers is not None:
            write_trajectories(answers, 0, groups, to_batch(groups))
        room = RoomWatch()
        room.note(groups, "evaluation")
        room.check()
        roles.reward.check_share(groups)
    answered = answered_of(groups, sets.label)
    metrics, data = metrics_of(groups, sets.label), summarize(answered, config.seed)
    if saved is None:
        return Evaluation(metrics, data, {}, {})
    other = answered_of(saved, sets.label)
    return Evaluation(metrics, data, summarize_pair(answered, other, config.seed), without_accuracy(other))


def _read_answers(path: Path, prompts: RLHFDataset) -> list[Group]:
    saved = read_groups(path, 0)
    check_same_prompts(saved, [prompts[row] for row in range(len(prompts))], path)
    return saved
