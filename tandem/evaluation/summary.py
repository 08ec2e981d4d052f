"""Answers -> what `tandem eval` prints, and what it writes as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tandem.evaluation.answered import Answered, by_source, without_accuracy
from tandem.evaluation.estimates import estimates
from tandem.evaluation.intervals import CONFIDENCE, Values, bounds_of, mean_interval
from tandem.evaluation.paired import POWER, compare

Json = dict[str, Any]


def summarize(answered: Sequence[Answered], seed: int) -> Json:
    """Data source -> counts, and each metric with its interval. Of a metric without a prompt there is nothing."""
    lacking = without_accuracy(answered)
    return {
        source: _summarize_source(prompts, seed, lacking.get(source, (0, 0))[0])
        for source, prompts in by_source(answered).items()
    }


def _summarize_source(prompts: Sequence[Answered], seed: int, without_acc: int) -> Json:
    metrics: Json = {}
    for name, values_P in estimates(prompts, seed).items():
        known_P = values_P[~np.isnan(values_P)]
        if len(known_P):
            low, high = mean_interval(known_P, bounds_of(known_P)) or (None, None)
            metrics[name] = {"value": float(known_P.mean()), "low": low, "high": high, "prompts": len(known_P)}
    return {
        "prompts": len(prompts),
        "answers": sum(len(prompt.rewards) + prompt.unscored for prompt in prompts),
        "unscored": sum(prompt.unscored for prompt in prompts),
        "without_acc": without_acc,
        "metrics": metrics,
    }


def summarize_pair(first: Sequence[Answered], second: Sequence[Answered], seed: int) -> Json:
    """Data source -> each metric that both have: how much more the first has, and what that may be.

    Both are answers to the same prompts (`check_same_prompts`). Of fewer than two prompts there is nothing.
    """
    theirs = by_source(second)
    return {
        source: _compared(estimates(prompts, seed), estimates(theirs[source], seed), seed)
        for source, prompts in by_source(first).items()
    }


def _compared(ours: Mapping[str, Values], theirs: Mapping[str, Values], seed: int) -> Json:
    compared: Json = {}
    for name in ours:
        if name in theirs:
            differences_P = ours[name] - theirs[name]
            known_P = differences_P[~np.isnan(differences_P)]
            if len(known_P) > 1:
                compared[name] = asdict(compare(known_P, seed))
    return compared


def lines(data: Json) -> Iterator[str]:
    """What a person reads of `summarize`."""
    for source, found in data.items():
        unscored = f", {found['unscored']} without a score" if found["unscored"] else ""
        yield f"{source}: {found['prompts']} prompts, {found['answers']} answers{unscored}; {CONFIDENCE:.0%} intervals"
        for name, of in found["metrics"].items():
            alike = "one prompt" if of["prompts"] == 1 else "equal prompts"
            interval = f"(no interval of {alike})" if of["low"] is None else f"[{of['low']:.4f}, {of['high']:.4f}]"
            fewer = f"  of {of['prompts']} prompts" if of["prompts"] < found["prompts"] else ""
            yield f"  {name:<14} {of['value']:8.4f}  {interval}{fewer}"
        if lacking := found["without_acc"]:
            scored = found["answers"] - found["unscored"]
            yield f"  acc/…          none: {lacking} of {scored} scored answers have no acc"


def pair_lines(data: Json, other: str, lacking: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """What a person reads of `summarize_pair`; `other` is what was compared with, whose answers lack `acc` as
    `without_accuracy` has it in `lacking`."""
    for source, found in data.items():
        yield f"{source}: difference to {other}"
        if source in lacking:
            without, scored = lacking[source]
            yield f"  acc/…          not compared: {without} of {scored} scored answers there have no acc"
        for name, of in found.items():
            begin = f"  {name:<14} {of['difference']:+8.4f}"
            if of["detectable"] is None:
                how = "not at all" if of["difference"] == 0 else "by as much"
                yield f"{begin}  all {of['prompts']} prompts differ {how}: how far others would is not known"
                continue
            yield (
                f"{begin}  [{of['low']:+.4f}, {of['high']:+.4f}]  p {of['p_value']:.4f}; "
                f"{of['prompts']} prompts detect {of['detectable']:.4f} with power {POWER}"
            )
