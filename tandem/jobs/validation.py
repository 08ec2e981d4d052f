"""How good is the policy now: mean@N, best@N and maj@N of each data source."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from tandem.config.tree import RolloutConfig
from tandem.controller.assembly import ExperienceRoles
from tandem.data.dataset import RLHFDataset
from tandem.types import Group, Score, StepMetrics
from tandem.workers.rollout import EVAL, seeded_requests


def validate(roles: ExperienceRoles, dataset: RLHFDataset, config: RolloutConfig, seed: int, step: int) -> list[Group]:
    """Answer every prompt as `generation.eval` says, with seeds drawn from `seed`, and score the answers."""
    prompts = [dataset[row] for row in range(len(dataset))]
    requests = seeded_requests(prompts, config.generation.eval.samples, seed, EVAL, step)
    roles.devices.to_generation()
    return roles.reward.score(roles.rollout.generate_for_eval(requests).get(), step)


def summarize(groups: Sequence[Group]) -> StepMetrics:
    """`val/<source>/<what>/mean@N | best@N | maj@N`, averaged over prompts; answers without a score are counted, not 0.

    `acc` comes beside `reward` where the reward function reports it. N is the largest number of answers that a prompt
    has; best and maj need N > 1, maj also predictions (`pred`).
    """
    by_source: dict[str, list[list[Score]]] = defaultdict(list)
    lost: Counter[str] = Counter()
    for group in groups:
        source = group.trajectories[0].prompt.data_source
        scored = [score for score in group.scores if score.value is not None]
        lost[source] += len(group.scores) - len(scored)
        by_source[source] += [scored] if scored else []
    metrics: StepMetrics = {f"val/{source}/unscored": float(count) for source, count in lost.items()}
    for source, prompts in by_source.items():
        if prompts:
            metrics |= {f"val/{source}/{name}": value for name, value in _summarize_source(prompts).items()}
    return metrics


def _summarize_source(prompts: Sequence[Sequence[Score]]) -> StepMetrics:
    n = max(len(scores) for scores in prompts)
    metrics = {f"reward/mean@{n}": fmean(fmean(s.value for s in scores if s.value is not None) for scores in prompts)}
    if all("acc" in score.parts for scores in prompts for score in scores):
        metrics[f"acc/mean@{n}"] = fmean(fmean(s.parts["acc"] for s in scores) for scores in prompts)
        if n > 1:
            metrics[f"acc/best@{n}"] = fmean(max(s.parts["acc"] for s in scores) for scores in prompts)
        if n > 1 and any(score.prediction is not None for scores in prompts for score in scores):
            metrics[f"acc/maj@{n}"] = fmean(_majority(scores) for scores in prompts)
    return metrics


def _majority(scores: Sequence[Score]) -> float:
    """Accuracy of the most frequent prediction; the earliest among equally frequent ones."""
    winner = Counter(score.prediction for score in scores).most_common(1)[0][0]
    return next(score.parts["acc"] for score in scores if score.prediction == winner)
