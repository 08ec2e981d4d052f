"""How good is the policy now: mean@N, best@N and maj@N of each data source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tandem.reward.manager import RewardManager
from tandem.types import Group, Prompt, Score, StepMetrics
from tandem.workers.rollout import RolloutWorker


def validate(
    rollout: RolloutWorker, reward: RewardManager, prompts: Sequence[Prompt], step: int
) -> tuple[StepMetrics, list[Group]]:
    """Answer every prompt as `generation.eval` says and score the answers."""
    groups = reward.score(rollout.generate_for_eval(prompts, step), step)
    return summarize(groups), groups


def summarize(groups: Sequence[Group]) -> StepMetrics:
    """`val/<source>/<core>/mean@N | best@N | maj@N`, averaged over prompts; answers without a score are counted, not 0.

    The core metric is `acc` where the reward function reports it, else the reward. N is the largest number of answers
    that a prompt has; best and maj need N > 1, maj also the predictions (`pred`).
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
        metrics |= {f"val/{source}/{name}": value for name, value in _summarize_source(prompts).items()}
    return metrics


def _summarize_source(prompts: Sequence[Sequence[Score]]) -> StepMetrics:
    samples = max(len(scores) for scores in prompts)
    metrics = {f"reward/mean@{samples}": _mean(_mean([_value(s) for s in scores]) for scores in prompts)}
    if all("acc" in score.parts for scores in prompts for score in scores):
        metrics[f"acc/mean@{samples}"] = _mean(_mean([s.parts["acc"] for s in scores]) for scores in prompts)
        if samples > 1:
            metrics[f"acc/best@{samples}"] = _mean(max(s.parts["acc"] for s in scores) for scores in prompts)
            if all(score.prediction is not None for scores in prompts for score in scores):
                metrics[f"acc/maj@{samples}"] = _mean(_majority(scores) for scores in prompts)
    return metrics


def _majority(scores: Sequence[Score]) -> float:
    """Accuracy of the most frequent prediction; the earliest among equally frequent ones."""
    winner = Counter(score.prediction for score in scores).most_common(1)[0][0]
    return next(score.parts["acc"] for score in scores if score.prediction == winner)


def _value(score: Score) -> float:
    assert score.value is not None
    return score.value


def _mean(values: object) -> float:
    listed = [float(value) for value in values]  # type: ignore[attr-defined]
    return sum(listed) / len(listed)
