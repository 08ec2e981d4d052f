"""Rewards of a trained model, alone or on top of reward functions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

import numpy as np

from tandem.batching.packing import demonstrations_to_batch, scored_at_the_end
from tandem.controller.reward_reader import NotRead, RewardReader, row_of_ids
from tandem.controller.roles import ValueModel
from tandem.controller.timesharing import Devices
from tandem.controller.worker_groups import Future
from tandem.types import Batch, Demonstration, FloatArray, Group, IntArray, Score, Status, Trajectory


class Rewards(Protocol):
    """Trajectory -> Score: what `RewardManager` does."""

    @property
    def by_step(self) -> bool:
        """Whether groups of a step must be scored together, by `score`; if not, these are `GroupRewards`."""
        ...

    def score(self, answers_by_prompt: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """A group for each prompt's trajectories."""
        ...

    def check_share(self, groups: Iterable[Group]) -> None:
        """Raises RewardShareExceeded where more of them than `reward.max_error_share` failed."""
        ...


class GroupRewards(Rewards, Protocol):
    """Rewards that score groups as they come, and a source of what the controller waits for."""

    def submit(
        self, answers_by_prompt: Sequence[list[Trajectory]], step: int, done: Callable[[list[Group]], None]
    ) -> None:
        """Have them scored as `score` does; a later `poll` gives `done` the groups, in their order."""
        ...

    def so_far(self, siblings: list[Trajectory]) -> Group:
        """A submitted group as it stands: answers that are still being scored have no score yet."""
        ...

    def connections(self) -> Sequence[Any]:
        """One of them is readable when `poll` has something to do; empty when nothing is under way."""
        ...

    def poll(self) -> None:
        """Take in what is there, hand out more, and not wait. Called at least every second; may raise."""
        ...

    def forget(self) -> None:
        """Nobody wants the groups that were submitted."""
        ...


def scores_groups(rewards: Rewards) -> TypeGuard[GroupRewards]:
    """Whether groups may be submitted one by one, as soon as they are complete."""
    return not rewards.by_step


@dataclass(slots=True)
class PendingScores:
    """The model's scores, which may still be on their way."""

    rows: list[Demonstration | NotRead]
    """What it reads of each trajectory, or why it does not."""
    values: Future[FloatArray] | None
    """Of the rows that it reads; None where there are none."""

    def get(self) -> list[float | NotRead]:
        """The score of each trajectory; waits."""
        values = iter([] if self.values is None else self.values.get().tolist())
        return [row if isinstance(row, NotRead) else next(values) for row in self.rows]


class ModelRewards:
    """weight * score of the model (`reward/model`), plus the functions' reward; where one fails, so does the reward.

    The model reads the token ids of prompt and response, or what `reader` makes of their conversation.
    """

    by_step = True
    """The model's devices are free only after generation."""

    def __init__(
        self,
        model: ValueModel,
        weight: float,
        functions: Rewards,
        devices: Devices,
        *,
        alone: bool,
        reader: RewardReader | None = None,
    ) -> None:
        """`alone`: the functions are not asked. `reader`: of a model with a tokenizer or chat template of its own."""
        self._model = model
        self._weight = weight
        self._functions = functions
        self._devices = devices
        self._alone = alone
        self.reader = reader

    def score(self, answers_by_prompt: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """The model scores while the functions do."""
        scoring = self.score_by_model(answers_by_prompt)
        groups = without_functions(answers_by_prompt) if self._alone else self._functions.score(answers_by_prompt, step)
        model_scores = iter(scoring.get())
        return [
            replace(group, scores=[self._add(*pair, next(model_scores)) for pair in _answers_of(group)])
            for group in groups
        ]

    def score_by_model(self, answers_by_prompt: Sequence[list[Trajectory]]) -> PendingScores:
        """The model's own score of each trajectory, head to tail; only after generation."""
        rows = [row for group in answers_by_prompt for row in self._rows(group)]
        groups = np.repeat(np.arange(len(answers_by_prompt)), [len(group) for group in answers_by_prompt])
        readable = [place for place, row in enumerate(rows) if not isinstance(row, NotRead)]
        self._devices.to_scoring()
        if not readable:
            return PendingScores(rows, None)
        batch = ends_of_answers([row for row in rows if not isinstance(row, NotRead)], groups[readable])
        return PendingScores(rows, self._model.values(batch).map(lambda values_T: values_T[batch.loss_mask]))

    def check_share(self, groups: Iterable[Group]) -> None:
        """What the functions say of it."""
        self._functions.check_share(groups)

    def _rows(self, siblings: Sequence[Trajectory]) -> Sequence[Demonstration | NotRead]:
        return [row_of_ids(t) for t in siblings] if self.reader is None else self.reader.rows(siblings)

    def _add(self, trajectory: Trajectory, score: Score, model_score: float | NotRead) -> Score:
        if score.value is None:
            return score
        if isinstance(model_score, NotRead):
            place = f"row {trajectory.prompt.index}, sample {trajectory.sample}"
            error = f"model.reward_model_path has not read {place}: {model_score}"
            return replace(score, value=None, parts={}, failure=Status.REWARD_ERROR, error=error)
        value = score.value + self._weight * model_score
        return replace(score, value=value, parts={**score.parts, "model": model_score})


def _answers_of(group: Group) -> Iterable[tuple[Trajectory, Score]]:
    return zip(group.trajectories, group.scores, strict=True)


def ends_of_answers(rows: Sequence[Demonstration], groups_B: IntArray) -> Batch:
    """The rows, each with one token more, the only one in the mask: its value is the score of what comes before it."""
    return demonstrations_to_batch([scored_at_the_end(row) for row in rows], groups_B)


def without_functions(answers_by_prompt: Sequence[list[Trajectory]]) -> list[Group]:
    """Groups with what the environment gave, or 0, where an answer is whole."""
    return [Group(group, [_without_function(t) for t in group]) for group in answers_by_prompt]


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
