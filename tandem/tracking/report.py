"""report.html: a run at a glance in one file, light or dark, on a desk or a phone; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import UserError
from tandem.files import write_text
from tandem.tracking.charts import Series, figure, number
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.samples import samples_section, visible
from tandem.tracking.style import STYLE

_CHARTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "Reward": [
        ("Reward", ("reward/mean", "reward/min", "reward/max")),
        ("Lost rewards", ("reward/errors", "reward/timeouts", "reward/not_scored")),
        ("Reward parts", ("reward/*",)),
        ("Advantage", ("advantage/mean", "advantage/std")),
        ("Share without advantage", ("advantage/zero_share",)),
    ],
    "Validation": [("Accuracy", ("val/*/acc/*",)), ("Reward", ("val/*/reward/*",)), ("Other", ("val/*",))],
    "Length": [
        ("Response length (tokens)", ("response_length/mean", "response_length/min", "response_length/max")),
        ("Cut off at the limit (share)", ("response_length/clip_ratio",)),
        ("Prompt length (tokens)", ("prompt_length/mean", "prompt_length/min", "prompt_length/max")),
    ],
    "Policy": [
        ("Loss", ("actor/pg_loss", "sft/loss", "actor/loss")),
        ("KL to the reference", ("actor/kl",)),
        ("Entropy (nats)", ("actor/entropy", "rollout/entropy")),
        ("Clipped (share of tokens)", ("actor/clip_fraction", "actor/clip_fraction_dual")),
        ("Gradient norm", ("actor/grad_norm", "sft/grad_norm")),
        ("Learning rate", ("actor/lr", "critic/lr", "sft/lr")),
        ("KL coefficient", ("actor/kl_coefficient",)),
        ("Trained (share of tokens)", ("actor/trained_share",)),
        ("Perplexity", ("sft/perplexity",)),
    ],
    "Critic": [
        ("Explained variance", ("critic/vf_explained_var",)),
        ("Value loss", ("critic/vf_loss",)),
        ("Value", ("critic/value_*",)),
        ("Clipped (share of tokens)", ("critic/vf_clip_fraction",)),
        ("Gradient norm", ("critic/grad_norm",)),
    ],
    "Rollout against trainer": [
        ("Mismatch, KL", ("rollout/mismatch_kl",)),
        ("Mismatch, largest", ("rollout/mismatch_max",)),
        ("Staleness (versions)", ("rollout/staleness/*",)),
    ],
    "Speed": [
        ("Time per stage (s)", ("time/*",)),
        ("Throughput (tokens/s)", ("perf/tokens_per_s", "perf/tokens_per_s_per_gpu")),
        ("Model FLOP utilisation", ("perf/mfu",)),
        ("Peak memory (GiB)", ("perf/peak_memory_gib",)),
    ],
    "Further": [("Epoch", ("data/epoch",))],
}
"""Section -> its charts: title and metric names (patterns). A metric belongs to the first chart that matches it."""

Records = list[dict[str, Any]]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from what the run directory holds; raises UserError when that is not a run."""
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run directory (no config.yaml)")
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    metrics = run_dir / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    title = f"{config.get('algorithm', {}).get('type', 'sft').upper()} · {Path(config['model']['path']).name}"
    body = [
        f"<header><h1>{_text(title)}</h1><p>{_text(run_dir.resolve().name)}</p></header>",
        _before_after(run_dir / "summary.json"),
        _tiles(records),
        _charts(records),
        samples_section(run_dir / "trajectories"),
        _setting(run_dir),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
    write_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def _text(value: object) -> str:
    return escape(visible(str(value)))


def _before_after(summary: Path) -> str:
    """What training changed, if the run has a summary with `before` and `after`."""
    if not summary.exists():
        return ""
    found = json.loads(summary.read_text(encoding="utf-8"))
    before, after = found.get("before", {}), found.get("after", {})
    shared = [name for name in before if all(isinstance(side.get(name), int | float) for side in (before, after))]
    cards = [_gain(name, before[name], after[name]) for name in shared]
    return f'<section class="gains">{"".join(cards)}</section>'


def _gain(name: str, before: float, after: float) -> str:
    numbers = f"<p><s>{number(before)}</s> <i>→</i> <b>{number(after)}</b></p>"
    return f'<div class="gain"><span>{_text(name)}</span>{numbers}{_bar(before, after)}</div>'


def _bar(before: float, after: float) -> str:
    """Both numbers on a scale from 0 to 1, where they lie on it."""
    if not (0 <= before <= 1 and 0 <= after <= 1):
        return ""
    low, high = sorted((100 * before, 100 * after))
    return (
        f'<div class="scale"><u style="width:{low:.1f}%"></u>'
        f'<u class="change" style="left:{low:.1f}%;width:{high - low:.1f}%"></u></div>'
    )


def _tiles(records: Records) -> str:
    """The run in a few numbers."""
    if not records:
        return "<p>No step is recorded yet.</p>"
    curves = {one.name: [value for _, value in one.points] for one in _series(records)}
    facts: list[tuple[str, str]] = [("last step", str(records[-1]["step"]))]
    facts += [(name, number(curves[name][-1])) for name in ("reward/mean", "sft/loss") if name in curves]
    accuracies = [name for name in curves if fnmatchcase(name, "val/*/acc/mean@*")]
    facts += [(f"best {name}", number(max(curves[name]))) for name in accuracies]
    if "time/step_s" in curves:
        facts.append(("time in steps", _duration(sum(curves["time/step_s"]))))
    if speed := curves.get("perf/tokens_per_s"):
        facts.append(("tokens/s, mean", number(sum(speed) / len(speed))))
    cells = [f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in facts]
    return f'<section class="tiles">{"".join(cells)}</section>'


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _charts(records: Records) -> str:
    """Every metric once: in a chart, or as a number where nothing in its chart ever changed."""
    left = {one.name: one for one in _series(records)}
    sections: list[str] = []
    for section, charts in _CHARTS.items():
        groups = [(title, taken) for title, patterns in charts if (taken := _take(left, patterns))]
        if section == "Further":
            groups += [(one.name, [one]) for one in left.values()]
        figures = [_figure(title, taken) for title, taken in groups if not _constant(taken)]
        still = [_still(one) for _, taken in groups if _constant(taken) for one in taken]
        constants = f'<p class="constant">constant: {"".join(still)}</p>' if still else ""
        if groups:
            charted = f'<div class="charts">{"".join(figures)}</div>'
            sections.append(f"<section><h2>{section}</h2>{charted}{constants}</section>")
    return "".join(sections)


def _constant(taken: list[Series]) -> bool:
    return all(len(one.points) > 1 and len({value for _, value in one.points}) == 1 for one in taken)


def _still(one: Series) -> str:
    return f"<span>{_text(one.name)} <em>{number(one.points[0][1])}</em></span>"


def _series(records: Records) -> list[Series]:
    """A curve a metric, values that are not finite left out, in order of first appearance."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                points.setdefault(name, []).append((record["step"], value))
    return [Series(name, found) for name, found in points.items()]


def _take(left: dict[str, Series], patterns: Iterable[str]) -> list[Series]:
    """Remove and return what matches, in the order of the patterns."""
    names = [name for pattern in patterns for name in left if fnmatchcase(name, pattern)]
    return [left.pop(name) for name in dict.fromkeys(names)]


def _figure(title: str, taken: list[Series]) -> str:
    """Mean, minimum and maximum of one thing are a curve in a band."""
    by_statistic = {one.name.rpartition("/")[2]: one for one in taken}
    if set(by_statistic) == {"mean", "min", "max"}:
        return figure(title, [by_statistic["mean"]], band=(by_statistic["min"], by_statistic["max"]))
    return figure(title, taken)


def _setting(run_dir: Path) -> str:
    """The configuration, and what the run ran on."""
    paths = [path for path in (run_dir / "config.yaml", run_dir / "environment.json") if path.exists()]
    shown = [
        f"<details><summary>{path.name}</summary><pre>{_text(path.read_text(encoding='utf-8'))}</pre></details>"
        for path in paths
    ]
    return f"<section><h2>Setting</h2>{''.join(shown)}</section>"
