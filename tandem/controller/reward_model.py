"""Rewards of a trained model, alone or on top of reward functions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

import numpy as np

from tandem.batching.packing import demonstrations_to_batch, scored_at_the_end
from tandem.controller.groups import Future
from tandem.controller.roles import ValueModel
from tandem.controller.timesharing import Devices
from tandem.types import Batch, Demonstration, FloatArray, Group, Score, Status, Trajectory


class Rewards(Protocol):
    """Trajectory -> Score: what `RewardManager` does."""

    @property
    def by_step(self) -> bool:
        """Whether groups of a step must be scored together, by `score`; if not, these are `GroupRewards`."""
        ...

    def score(self, siblings: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """A group for each prompt's trajectories."""
        ...

    def check_share(self, groups: Iterable[Group]) -> None:
        """Raises RewardShareExceeded where more of them than `reward.max_error_share` failed."""
        ...


class GroupRewards(Rewards, Protocol):
    """Rewards that score groups as they come, and a source of what the controller waits for."""

    def submit(self, siblings: Sequence[list[Trajectory]], step: int, done: Callable[[list[Group]], None]) -> None:
        """Have them scored as `score` does; a later `turn` gives `done` the groups, in their order."""
        ...

    def so_far(self, siblings: list[Trajectory]) -> Group:
        """A submitted group as it stands: answers that are still being scored have no score yet."""
        ...

    def connections(self) -> Sequence[Any]:
        """One of them is readable when `turn` has something to do; empty when nothing is under way."""
        ...

    def turn(self) -> None:
        """Take in what is there, hand out more, and not wait. Called at least every second; may raise."""
        ...

    def forget(self) -> None:
        """Nobody wants the groups that were submitted."""
        ...


def scores_groups(rewards: Rewards) -> TypeGuard[GroupRewards]:
    """Whether groups may be submitted one by one, as soon as they are complete."""
    return not rewards.by_step


class ModelRewards:
    """weight * score of the model (`reward/model`), plus the functions' reward; where they fail, so does the reward.

    The model reads the token ids of prompt and response, so its tokenizer must be the policy's.
    """

    by_step = True
    """The model's devices are free only after generation."""

    def __init__(self, model: ValueModel, weight: float, functions: Rewards, devices: Devices, *, alone: bool) -> None:
        """`alone`: the functions are not asked."""
        self._model = model
        self._weight = weight
        self._functions = functions
        self._devices = devices
        self._alone = alone

    def score(self, siblings: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """The model scores while the functions do."""
        scoring = self.score_by_model(siblings)
        groups = without_functions(siblings) if self._alone else self._functions.score(siblings, step)
        model_scores = iter(scoring.get().tolist())
        return [
            replace(group, scores=[self._add(score, next(model_scores)) for score in group.scores]) for group in groups
        ]

    def score_by_model(self, siblings: Sequence[list[Trajectory]]) -> Future[FloatArray]:
        """The model's own score of each trajectory, head to tail; only after generation."""
        batch = _ends_of_answers(siblings)
        self._devices.to_scoring()
        return self._model.values(batch).map(lambda values_T: values_T[batch.loss_mask])

    def check_share(self, groups: Iterable[Group]) -> None:
        """What the functions say of it."""
        self._functions.check_share(groups)

    def _add(self, score: Score, model_score: float) -> Score:
        if score.value is None:
            return score
        value = score.value + self._weight * model_score
        return replace(score, value=value, parts={**score.parts, "model": model_score})


def _ends_of_answers(siblings: Sequence[list[Trajectory]]) -> Batch:
    """Every trajectory as a row whose only token in the mask comes after the answer: its value is the score.

    Of several branches the one is read that the trajectory ended in.
    """
    lasts = [trajectory.every_branch[trajectory.ends_in] for group in siblings for trajectory in group]
    groups = np.repeat(np.arange(len(siblings)), [len(group) for group in siblings])
    rows = [Demonstration(0, last.prompt_ids, last.response_ids, last.loss_mask, last.pictures) for last in lasts]
    return demonstrations_to_batch([scored_at_the_end(row) for row in rows], groups)


def without_functions(siblings: Sequence[list[Trajectory]]) -> list[Group]:
    """Groups with what the environment gave, or 0, where an answer is whole."""
    return [Group(group, [_without_function(t) for t in group]) for group in siblings]


def _without_function(trajectory: Trajectory) -> Score:
    match trajectory.status:
        case Status.ABORTED:
            return Score(None, failure=Status.NOT_SCORED)
        case Status.ENVIRONMENT_ERROR:
            return Score(None, failure=trajectory.status, error=trajectory.error)
        case _ if trajectory.reward is None:
            return Score(0.0)
        case _:
            return Score(trajectory.reward, {"environment": trajectory.reward}, environment_weight=1.0)
