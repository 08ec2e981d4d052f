"""report.html: a run at a glance in one file, light or dark, on a desk or a phone; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import UserError
from tandem.files import write_text
from tandem.tracking.charts import Series, figure, number
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.samples import samples_section, visible

_SECTIONS = {
    "Reward": ("reward", "advantage"),
    "Validation": ("val",),
    "Length": ("response_length", "prompt_length"),
    "Supervised fine-tuning": ("sft",),
    "Policy": ("actor",),
    "Critic": ("critic",),
    "Rollout against trainer": ("rollout",),
    "Speed": ("time", "perf"),
}
"""Heading -> first parts of the metric names below it; any other name comes under `Further`."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from what the run directory holds; raises UserError when that is not a run."""
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run directory (no config.yaml)")
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    metrics = run_dir / "metrics.jsonl"
    curves = _curves(read_metrics(metrics) if metrics.exists() else [])
    title = _text(f"{config.get('algorithm', {}).get('type', 'sft').upper()} · {run_dir.resolve().name}")
    body = [
        f"<header><h1>{title}</h1><p>{_text(config['model']['path'])}</p></header>",
        _before_after(run_dir / "summary.json"),
        _tiles(curves),
        *_charts(curves),
        samples_section(run_dir / "trajectories"),
        _setting(run_dir),
    ]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
    write_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def _text(value: object) -> str:
    return escape(visible(str(value)))


def _curves(records: list[dict[str, Any]]) -> list[Series]:
    """A curve a metric, without the values that are not finite, in order of first appearance."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                points.setdefault(name, []).append((record["step"], value))
    return [Series(name, found) for name, found in points.items()]


def _before_after(summary: Path) -> str:
    """What training changed, if the run has a summary with `before` and `after`."""
    if not summary.exists():
        return ""
    found = json.loads(summary.read_text(encoding="utf-8"))
    before, after = found.get("before", {}), found.get("after", {})
    shared = [name for name in before if all(isinstance(side.get(name), int | float) for side in (before, after))]
    return f'<section class="gains">{"".join(_gain(name, before[name], after[name]) for name in shared)}</section>'


def _gain(name: str, before: float, after: float) -> str:
    """Both numbers, and both on a scale from 0 to 1 where they lie on it."""
    numbers = f"<p><s>{number(before)}</s> <i>→</i> <b>{number(after)}</b></p>"
    low, high = sorted((100 * before, 100 * after))
    bars = f'<u style="width:{low:.1f}%"></u><u class="change" style="left:{low:.1f}%;width:{high - low:.1f}%"></u>'
    scale = f'<div class="scale">{bars}</div>' if 0 <= low <= high <= 100 else ""
    return f'<div class="gain"><span>{_text(name)}</span>{numbers}{scale}</div>'


def _tiles(curves: list[Series]) -> str:
    """The run in a few numbers."""
    if not curves:
        return "<p>No step is recorded yet.</p>"
    values = {one.name: [value for _, value in one.points] for one in curves}
    facts = [("last step", str(max(one.points[-1][0] for one in curves)))]
    facts += [(name, number(values[name][-1])) for name in ("reward/mean", "sft/loss") if name in values]
    facts += [(f"best {name}", number(max(found))) for name, found in values.items() if "/acc/mean@" in name]
    if "time/step_s" in values:
        facts.append(("time in steps", str(timedelta(seconds=round(sum(values["time/step_s"]))))))
    if speed := values.get("perf/tokens_per_s"):
        facts.append(("tokens/s, mean", number(sum(speed) / len(speed))))
    cells = [f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in facts]
    return f'<section class="tiles">{"".join(cells)}</section>'


def _charts(curves: list[Series]) -> list[str]:
    """Every metric once: in a chart, or as a number where nothing in its chart ever changed."""
    charts: dict[str, dict[str, list[Series]]] = {section: {} for section in [*_SECTIONS, "Further"]}
    for one in curves:
        stage = one.name.partition("/")[0]
        section = next((section for section, stages in _SECTIONS.items() if stage in stages), "Further")
        charts[section].setdefault(_chart_of(one.name), []).append(one)
    return [_section(section, titled) for section, titled in charts.items() if titled]


def _chart_of(name: str) -> str:
    """Title of the chart that a metric is drawn in: what it has in common with those it is best compared with."""
    parent, _, last = name.rpartition("/")
    return parent if last in ("mean", "min", "max") or "@" in last or parent == "time" else name


def _section(heading: str, charts: dict[str, list[Series]]) -> str:
    moving = {title: taken for title, taken in sorted(charts.items()) if not all(map(_constant, taken))}
    still = [one for title, taken in charts.items() if title not in moving for one in taken]
    told = "".join(f"<span>{_text(one.name)} <em>{number(one.points[0][1])}</em></span>" for one in still)
    constants = f'<p class="constant">constant: {told}</p>' if still else ""
    drawn = "".join(_figure(title, taken) for title, taken in moving.items())
    return f'<section><h2>{heading}</h2><div class="charts">{drawn}</div>{constants}</section>'


def _constant(one: Series) -> bool:
    """Rounding noise is no change."""
    values = [value for _, value in one.points]
    return len(values) > 1 and max(values) - min(values) <= 1e-6 * max(map(abs, values))


def _figure(title: str, taken: list[Series]) -> str:
    """Mean, minimum and maximum of one thing are a curve in a band."""
    short = {one.name.removeprefix(f"{title}/"): one.points for one in taken}
    series = [Series(name, points) for name, points in short.items()]
    if set(short) != {"mean", "min", "max"}:
        return figure(title, series)
    return figure(
        title, [Series("mean", short["mean"])], band=(Series("min", short["min"]), Series("max", short["max"]))
    )


def _setting(run_dir: Path) -> str:
    """The configuration, and what the run ran on."""
    paths = [path for path in (run_dir / "config.yaml", run_dir / "environment.json") if path.exists()]
    shown = [
        f"<details><summary>{path.name}</summary><pre>{_text(path.read_text(encoding='utf-8'))}</pre></details>"
        for path in paths
    ]
    return f"<section><h2>Setting</h2>{''.join(shown)}</section>"
