"""What an evaluation keeps of each prompt, and which prompts are the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from tandem.errors import UserError
from tandem.types import Group, Prompt

_PICTURE = re.compile("<image>|<video>")


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


def without_accuracy(answered: Sequence[Answered]) -> dict[str, tuple[int, int]]:
    """How many of the scored answers of a source have no `acc`, and how many are scored; of sources where some have it
    and some have not, which have no accuracy for that."""
    found: dict[str, tuple[int, int]] = {}
    for source, prompts in by_source(answered).items():
        accuracies = [accuracy for prompt in prompts for accuracy in prompt.accuracies]
        if 0 < (lacking := accuracies.count(None)) < len(accuracies):
            found[source] = lacking, len(accuracies)
    return found


def by_source(answered: Iterable[Answered]) -> dict[str, list[Answered]]:
    """The prompts of each data source, in their order."""
    found: dict[str, list[Answered]] = {}
    for one in answered:
        found.setdefault(one.source, []).append(one)
    return found


def check_same_prompts(saved: Sequence[Group], prompts: Sequence[Prompt], path: Path) -> None:
    """Raises UserError unless the file's answers are to these rows: as many, with the same data sources, ground truths
    and questions. What stands around a question may differ, for chat templates do."""
    theirs = {group.trajectories[0].prompt.index: group.trajectories[0].prompt for group in saved}
    ours = {prompt.index: prompt for prompt in prompts}
    if what := _difference(theirs, ours):
        raise UserError(f"--against {path}: {what}; compare over the same rows")


def _difference(theirs: Mapping[int, Prompt], ours: Mapping[int, Prompt]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} prompts, and the configuration's validation data {len(ours)}"
    if theirs.keys() != ours.keys():
        return "it has other rows than the configuration's validation data"
    for row in sorted(ours):
        if _truth(theirs[row]) != _truth(ours[row]):
            return f"row {row} has data source and ground truth {_truth(theirs[row])}, and here {_truth(ours[row])}"
    asked = {row: question for row, prompt in sorted(ours.items()) if (question := _question(prompt))}
    texts = {row: _words(theirs[row].text) for row in asked}
    others = [row for row, question in asked.items() if question not in texts[row]]
    everything = "\n".join(texts.values())
    template_changes_it = len(others) == len(asked) and not any(question in everything for question in asked.values())
    if others and not template_changes_it:
        return f"row {others[0]} asks something else there than {asked[others[0]]!r:.100}"
    return ""


def _truth(prompt: Prompt) -> tuple[str, str]:
    return prompt.data_source, str(prompt.ground_truth)


def _question(prompt: Prompt) -> str:
    """The last of what the row's user says, but for its pictures; empty where the row does not tell."""
    asked = prompt.row.get("prompt", "")
    if isinstance(asked, list):
        said = [message.get("content") for message in asked if message.get("role") == "user"]
        asked = said[-1] if said else ""
    return _words(_PICTURE.split(asked)[-1]) if isinstance(asked, str) else ""


def _words(text: str) -> str:
    """With single spaces, for templates strip and indent."""
    return " ".join(text.split())
