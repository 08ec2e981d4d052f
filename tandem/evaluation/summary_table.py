"""Several data sources in one table: a line each, of the numbers that are looked at first."""

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.evaluation.intervals import CONFIDENCE

_NONE = "-"


def table(data: Mapping[str, Any], against: Mapping[str, Any]) -> Iterator[str]:
    """Lines of what `summarize` and `summarize_pair` found: the mean of `acc`, or else of the reward, its interval, and
    the best and the majority of most answers; with `against`, the difference of the means and its p."""
    head = ["", "prompts", "answers", "mean of", "", f"{CONFIDENCE:.0%} interval", "best", "majority"]
    rows = [head + (["difference", "p"] if against else [])]
    rows += [
        _row(source, found) + (_compared(against.get(source, {})) if against else []) for source, found in data.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *aligned)).rstrip()


def _row(source: str, found: Mapping[str, Any]) -> list[str]:
    metrics: Mapping[str, Any] = found["metrics"]
    unscored = f" ({found['unscored']} unscored)" if found["unscored"] else ""
    counts = [source, str(found["prompts"]), f"{found['answers']}{unscored}"]
    name = _mean(metrics)
    if name is None:
        return [*counts, *[_NONE] * 5]
    of = metrics[name]
    interval = _NONE if of["low"] is None else f"[{of['low']:.4f}, {of['high']:.4f}]"
    mean = [name.partition("/")[0], f"{of['value']:.4f}", interval]
    return [*counts, *mean, _last(metrics, "best@"), _last(metrics, "maj@")]


def _compared(found: Mapping[str, Any]) -> list[str]:
    name = _mean(found)
    return [_NONE, _NONE] if name is None else [f"{found[name]['difference']:+.4f}", f"{found[name]['p_value']:.4f}"]


def _mean(metrics: Mapping[str, Any]) -> str | None:
    return next((name for name in ("acc/mean", "reward/mean") if name in metrics), None)


def _last(metrics: Mapping[str, Any], kind: str) -> str:
    """The metric of this kind with the largest k, the last one."""
    names = [name for name in metrics if name.removeprefix("acc/").startswith(kind)]
    return f"{names[-1].removeprefix('acc/')} {metrics[names[-1]]['value']:.4f}" if names else _NONE
