"""How good is the policy now: mean@N, best@N and maj@N of each data source."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations, islice
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from tandem.activity import begin
from tandem.config.generation import EvalSamplingConfig
from tandem.config.tree import RolloutConfig
from tandem.controller.assembly import ExperienceRoles
from tandem.data.dataset import RLHFDataset
from tandem.errors import UserError
from tandem.evaluation.estimates import majority_of
from tandem.reward.manager import ending_early
from tandem.types import Group, Prompt, Score, StepMetrics
from tandem.workers.rollout import EVAL, seeded_request


class ValidationSet(NamedTuple):
    """Rows that are answered alike."""

    name: str | None
    """None: those of `data.val_files`."""
    rows: range
    sampling: EvalSamplingConfig


class ValidationSets:
    """Which rows of a data set of `data.val_paths` are of `data.val_files`, and of each of `data.val_sets`."""

    def __init__(self, dataset: RLHFDataset, config: RolloutConfig) -> None:
        """Raises UserError where a set has no row left, and where two would have the same metrics."""
        data, usual = config.data, config.generation.eval
        files: list[tuple[str | None, int, EvalSamplingConfig]] = []
        if data.val_files:
            files.append((None, len(data.val_files), usual))
        files += [(name, len(one.files), one.sampling(usual)) for name, one in data.val_sets.items()]
        counts, first = iter(dataset.items_of_files), 0
        self.sets: list[ValidationSet] = []
        for name, of_set, sampling in files:
            rows = range(first, first := first + sum(islice(counts, of_set)))
            if not rows:
                key = "data.val_files" if name is None else f"data.val_sets.{name}"
                raise UserError(f"{key}: no usable row is left; mend its rows, or remove it")
            self.sets.append(ValidationSet(name, rows, sampling))
        if len(self.sets) > 1:
            self._refuse_same_labels(dataset)

    def label(self, prompt: Prompt) -> str:
        """What the metrics of a row are called after `val/`: its data source, behind the name of its set."""
        name = next(one.name for one in self.sets if prompt.index in one.rows)
        return prompt.data_source if name is None else f"{name}/{prompt.data_source}"

    def _refuse_same_labels(self, dataset: RLHFDataset) -> None:
        labels = [{self.label(dataset[row]) for row in one.rows} for one in self.sets]
        for one, other in combinations(range(len(labels)), 2):
            if same := labels[one] & labels[other]:
                raise UserError(
                    f"data.val_sets.{self.sets[other].name}: metrics of its rows and of others would both be called "
                    f"val/{min(same)}/…; rename it"
                )


def validate(roles: ExperienceRoles, dataset: RLHFDataset, sets: ValidationSets, seed: int, step: int) -> list[Group]:
    """Answer every prompt as its set says, with seeds drawn from `seed`, and score the answers; in the rows' order.

    Raises RewardShareExceeded as soon as `check_share` is bound to.
    """
    requests = [
        seeded_request(dataset[row], one.sampling.samples, seed, EVAL, step, row)._replace(sampling=one.sampling)
        for one in sets.sets
        for row in one.rows
    ]
    begin("validation", len(requests), "prompts")
    roles.devices.to_generation()
    answers = roles.rollout.generate_for_eval(requests).get()
    begin("rewards of the validation")
    with ending_early():
        return roles.reward.score(answers, step)


def summarize(groups: Sequence[Group], label: Callable[[Prompt], str] = attrgetter("data_source")) -> StepMetrics:
    """`val/<label>/<what>/mean@N | best@N | maj@N`, averaged over prompts; answers without a score are counted, not 0.

    `acc` comes beside `reward` where the reward function reports it for every answer that has a score; where it does
    for some, `val/<label>/acc/share` says of how many there is one instead. N is the largest number of answers that a
    prompt has, with those without a score, so that a curve keeps its name where one is lost; best and maj need N > 1,
    maj also predictions (`pred`).
    """
    by_label: dict[str, list[list[Score]]] = defaultdict(list)
    lost: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for group in groups:
        called = label(group.trajectories[0].prompt)
        scored = [score for score in group.scores if score.value is not None]
        lost[called] += len(group.scores) - len(scored)
        answers[called] = max(answers[called], len(group.scores))
        by_label[called] += [scored] if scored else []
    metrics: StepMetrics = {f"val/{called}/unscored": float(count) for called, count in lost.items()}
    for called, prompts in by_label.items():
        if prompts:
            of_source = _summarize_source(prompts, answers[called])
            metrics |= {f"val/{called}/{name}": value for name, value in of_source.items()}
    return metrics


def _summarize_source(prompts: Sequence[Sequence[Score]], n: int) -> StepMetrics:
    metrics = {f"reward/mean@{n}": fmean(fmean(s.value for s in scores if s.value is not None) for scores in prompts)}
    has_acc = ["acc" in score.parts for scores in prompts for score in scores]
    if any(has_acc) and not all(has_acc):
        metrics["acc/share"] = fmean(has_acc)
    if all(has_acc):
        metrics[f"acc/mean@{n}"] = fmean(fmean(s.parts["acc"] for s in scores) for scores in prompts)
        if n > 1:
            metrics[f"acc/best@{n}"] = fmean(max(s.parts["acc"] for s in scores) for scores in prompts)
        if n > 1 and any(score.prediction is not None for scores in prompts for score in scores):
            metrics[f"acc/maj@{n}"] = fmean(_majority(scores) for scores in prompts)
    return metrics


def _majority(scores: Sequence[Score]) -> float:
    return majority_of([score.prediction for score in scores], [score.parts["acc"] for score in scores], len(scores))
