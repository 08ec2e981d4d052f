"""What an evaluation keeps of each prompt, and which prompts are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from tandem.errors import UserError
from tandem.types import Group, Prompt


@dataclass(slots=True)
class Answered:
    """The answers to one prompt. Those without a score are counted, and are in no list."""

    source: str
    rewards: list[float] = field(default_factory=list[float])
    accuracies: list[float | None] = field(default_factory=list[float | None])
    """None: the reward function reports no `acc`."""
    predictions: list[str | None] = field(default_factory=list[str | None])
    unscored: int = 0


def answered_of(groups: Sequence[Group], label: Callable[[Prompt], str] = attrgetter("data_source")) -> list[Answered]:
    """An entry a prompt, in the order of the rows that they are. `label` names the source that it is of."""
    made: list[Answered] = []
    for group in sorted(groups, key=lambda group: group.trajectories[0].prompt.index):
        one = Answered(label(group.trajectories[0].prompt))
        made.append(one)
        for score in group.scores:
            if score.value is None:
                one.unscored += 1
                continue
            one.rewards.append(score.value)
            one.accuracies.append(score.parts.get("acc"))
            one.predictions.append(score.prediction)
    return made


def by_source(answered: Iterable[Answered]) -> dict[str, list[Answered]]:
    """The prompts of each data source, in their order."""
    found: dict[str, list[Answered]] = {}
    for one in answered:
        found.setdefault(one.source, []).append(one)
    return found


def check_same_prompts(saved: Sequence[Group], prompts: Sequence[Prompt], path: Path) -> None:
    """Raises UserError unless the file's answers are to these rows: as many, with the same data sources and ground
    truths. Their texts may differ, for chat templates do."""
    theirs = {group.trajectories[0].prompt.index: _row(group.trajectories[0].prompt) for group in saved}
    ours = {prompt.index: _row(prompt) for prompt in prompts}
    if theirs == ours:
        return
    what = f"it has {len(theirs)} prompts, and data.val_files {len(ours)}"
    if theirs.keys() == ours.keys():
        row = next(index for index in sorted(ours) if theirs[index] != ours[index])
        what = f"row {row} has data source and ground truth {theirs[row]}, and in data.val_files {ours[row]}"
    elif len(theirs) == len(ours):
        what = "it has other rows than data.val_files"
    raise UserError(f"--against {path}: {what}; compare over the same rows")


def _row(prompt: Prompt) -> tuple[str, str]:
    return prompt.data_source, str(prompt.ground_truth)
