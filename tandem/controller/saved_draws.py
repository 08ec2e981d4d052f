"""Draws that no step has taken yet: into a checkpoint, and from there into a resumed run."""

from collections.abc import Mapping

from tandem.controller.scoring import GroupScoring, ScoredDraw
from tandem.types import Group, SavedGroup, Status

_FAILED = (Status.REWARD_ERROR, Status.REWARD_TIMEOUT)


def finished_draws(
    decided: Mapping[int, ScoredDraw], scoring: GroupScoring, kept: Mapping[int, bool | None]
) -> dict[int, SavedGroup]:
    """By draw: what was decided and what may be still, as far as it is answered. `kept`: the decisions, also those of a
    checkpoint on draws that are not decided again yet."""
    scored = {**decided, **scoring.scored}
    finished = {draw: _finished(one, kept.get(draw)) for draw, one in scored.items()}
    unscored = {
        draw: SavedGroup(Group(siblings, []), greedy, kept.get(draw))
        for draw, (siblings, greedy) in scoring.unscored.items()
    }
    return finished | unscored


def restore(draw: int, finished: SavedGroup, scoring: GroupScoring) -> None:
    """Have the draw decided, or scored first where that is due."""
    if finished.group.scores or finished.kept is False:
        scoring.scored[draw] = ScoredDraw(finished.group)
    else:
        scoring.answered(draw, finished.group.trajectories, finished.greedy)


def _finished(scored: ScoredDraw, kept: bool | None) -> SavedGroup:
    """For a checkpoint: without scores where a reward failed. A resumed run has them scored again, unless they were
    dropped, for what made it fail may be over; a run that this has stopped would stop once more."""
    if not any(score.failure in _FAILED for group in scored.groups for score in group.scores):
        return SavedGroup(scored.group, kept=kept)
    greedy = None if scored.greedy is None else scored.greedy.trajectories[0]
    return SavedGroup(Group(scored.group.trajectories, []), greedy, kept)
