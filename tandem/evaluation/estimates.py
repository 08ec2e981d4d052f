"""The answers to a prompt -> what one answer, the best of k and the majority of k are worth, without bias.

Each is a mean over all ways to draw k of the n answers, so that it does not grow with n as the best of n does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import comb

import numpy as np

from tandem.evaluation.answered import Answered
from tandem.evaluation.intervals import Values

_DRAWS = 256
"""Subsets of k answers that a majority is averaged over, a prompt."""


def best_of(values: Sequence[float], k: int) -> float:
    """The expected best of k of these, drawn without replacement.

    Of n verdicts 0 and 1, c of them 1: 1 - C(n - c, k) / C(n, k), pass@k of Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    In general the i-th smallest is the best of C(i - 1, k - 1) of the C(n, k) choices.
    """
    ways = comb(len(values), k)
    return sum(value * (comb(i, k - 1) / ways) for i, value in enumerate(sorted(values)))


def majority_of(
    predictions: Sequence[str | None], values: Sequence[float], k: int, rng: np.random.Generator | None = None
) -> float:
    """The expected value of the prediction that most of k answers agree on, drawn without replacement.

    Equally frequent predictions share: each is taken equally often. No prediction (None) is one like any other. With k
    answers in all it is exact, else a mean over random subsets, which `rng` draws.
    """
    known = {prediction: code for code, prediction in enumerate(dict.fromkeys(predictions))}
    codes = np.array([known[prediction] for prediction in predictions])
    worth = np.bincount(codes, np.asarray(values, float)) / np.bincount(codes)
    drawn = codes[None]
    if k < len(codes):
        assert rng is not None
        drawn = rng.permuted(np.tile(codes, (_DRAWS, 1)), axis=1)[:, :k]
    votes = (drawn[:, :, None] == np.arange(len(known))).sum(1)
    wins = votes == votes.max(1, keepdims=True)
    return float(((wins * worth).sum(1) / wins.sum(1)).mean())


def sizes(answers: int) -> list[int]:
    """The k of best@k and maj@k: powers of two, and all answers."""
    return [k for k in (2**power for power in range(1, answers.bit_length())) if k < answers] + [answers][: answers > 1]


def estimates(prompts: Sequence[Answered], seed: int) -> dict[str, Values]:
    """Name -> `[P]`, a value a prompt: NaN where too few of its answers have a score.

    `acc/…` where every score has `acc`; `best@k`, of verdicts 0 and 1 pass@k; `maj@k` with predictions.
    """
    rng = np.random.default_rng(seed)
    most = max((len(prompt.rewards) for prompt in prompts), default=0)
    values = {"reward/mean": _each(prompts, 1, lambda one: float(np.mean(one.rewards)))}
    accuracies = [accuracy for prompt in prompts for accuracy in prompt.accuracies]
    if not accuracies or None in accuracies:
        return values
    values["acc/mean"] = _each(prompts, 1, lambda one: float(np.mean(_accuracies(one))))
    for k in sizes(most):
        values[f"acc/best@{k}"] = _each(prompts, k, partial(_best, k))
    if any(prediction is not None for prompt in prompts for prediction in prompt.predictions):
        for k in filter(lambda k: k > 2, sizes(most)):  # of two answers either one may win: the mean
            values[f"acc/maj@{k}"] = _each(prompts, k, partial(_majority, k, rng))
    return values


def _each(prompts: Sequence[Answered], least: int, value: Callable[[Answered], float]) -> Values:
    return np.array([value(one) if len(one.rewards) >= least else np.nan for one in prompts])


def _best(k: int, one: Answered) -> float:
    return best_of(_accuracies(one), k)


def _majority(k: int, rng: np.random.Generator, one: Answered) -> float:
    return majority_of(one.predictions, _accuracies(one), k, rng)


def _accuracies(one: Answered) -> list[float]:
    return [accuracy for accuracy in one.accuracies if accuracy is not None]
