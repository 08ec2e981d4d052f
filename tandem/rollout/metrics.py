"""What is counted in conversations."""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from tandem.types import Group, Status, StepMetrics, Trajectory


def metrics(groups: Iterable[Group]) -> StepMetrics:
    """`conversation/…`: turns of the policy and what environments have counted, means over trajectories, and how many
    environments failed. Nothing where no answer is a conversation."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory.status is Status.ENVIRONMENT_ERROR for trajectory in trajectories]
    held = (trajectory.messages or "without_room" in trajectory.numbers for trajectory in trajectories)
    if not any(failed) and not any(held):
        return {}
    counted = [{**trajectory.numbers, "turns": float(_turns(trajectory))} for trajectory in trajectories]
    names = sorted({name for numbers in counted for name in numbers})
    means = {name: float(np.mean([numbers.get(name, 0.0) for numbers in counted])) for name in names}
    return {
        f"conversation/{name}": value for name, value in {**means, "environment_errors": float(sum(failed))}.items()
    }


def _turns(trajectory: Trajectory) -> int:
    """Of the policy, on all branches, each once: where it is trained."""
    return sum(
        turn.author == "policy" and bool(branch.loss_mask[end - turn.tokens : end].any())
        for branch in trajectory.every_branch
        for turn, end in zip(branch.turns, accumulate(turn.tokens for turn in branch.turns), strict=True)
    )
