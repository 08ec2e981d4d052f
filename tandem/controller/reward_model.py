"""Rewards of a trained model, alone or on top of reward functions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from tandem.batching.packing import demonstrations_to_batch, scored_at_the_end
from tandem.controller.groups import WorkerGroup
from tandem.types import Demonstration, Group, Score, Status, Trajectory


class Rewards(Protocol):
    """Trajectory -> Score: what `RewardManager` does."""

    def score(self, siblings: Sequence[list[Trajectory]], step: int = 0) -> list[Group]: ...

    def check_share(self, groups: Iterable[Group]) -> None: ...


class ModelRewards:
    """weight * score of the model (`reward/model`), plus what the functions say; where they fail, so does the reward.

    The model reads the token ids of prompt and response, so its tokenizer must be the policy's.
    """

    def __init__(self, model: WorkerGroup, weight: float, functions: Rewards, *, alone: bool) -> None:
        """`alone`: the functions are not asked."""
        self._model = model
        self._weight = weight
        self._functions = functions
        self._alone = alone

    def score(self, siblings: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        rows = [t for trajectories in siblings for t in trajectories]
        ends = [scored_at_the_end(Demonstration(0, t.prompt.token_ids, t.response_ids, t.loss_mask)) for t in rows]
        batch = demonstrations_to_batch(ends)
        batch.groups = np.repeat(np.arange(len(siblings), dtype=np.int32), [len(row) for row in siblings])
        values = self._model.values(batch)
        groups = self._unjudged(siblings) if self._alone else self._functions.score(siblings, step)
        said = iter(values.get()[batch.loss_mask].tolist())
        return [replace(group, scores=[self._add(score, next(said)) for score in group.scores]) for group in groups]

    def check_share(self, groups: Iterable[Group]) -> None:
        self._functions.check_share(groups)

    def _unjudged(self, siblings: Sequence[list[Trajectory]]) -> list[Group]:
        lost = Score(None, failure=Status.NOT_SCORED)
        return [Group(row, [lost if t.status is Status.ABORTED else Score(0.0) for t in row]) for row in siblings]

    def _add(self, score: Score, said: float) -> Score:
        if score.value is None:
            return score
        return replace(score, value=score.value + self._weight * said, parts={**score.parts, "model": said})
