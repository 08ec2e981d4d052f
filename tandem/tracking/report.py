"""report.html: a run at a glance in one file that loads nothing. The template beside this file draws what is here."""

import json
import math
from pathlib import Path
from typing import Any

from tandem.config.stored_run import StoredRun, pictures_of_run, stored_run
from tandem.errors import TandemError, UserError
from tandem.files import write_text
from tandem.pictures.store import PictureStore
from tandem.stored import DamagedFile, read_json, read_text
from tandem.tracking.jsonl import each_record
from tandem.tracking.samples import samples
from tandem.tracking.trajectories import files_by_step

Points = list[tuple[int, float]]  # (step, finite value), ascending
_SECTIONS = ("reward", "val", "conversation", "length", "sft", "actor", "critic", "rollout", "speed")
"""Sections in the order shown: first parts of metric names, or what `_MERGED` makes of them. Others follow."""
_MERGED = {"response_length": "length", "prompt_length": "length", "time": "speed", "perf": "speed"}
_MIN_POINTS = 1_000
"""Of a longer curve so many are shown at least, and fewer than twice as many."""
_LAST_VALUES = ("reward/mean", "sft/loss", "dpo/loss", "reward_model/loss")


class Curve:
    """A metric over the steps of a run, however many: evenly thinned points, the last value and the largest."""

    def __init__(self) -> None:
        self.largest = -math.inf
        self.last = 0, math.nan
        self._kept: Points = []
        self._seen, self._stride = 0, 1

    def add(self, step: int, value: float) -> None:
        self.last, self.largest = (step, value), max(self.largest, value)
        if self._seen % self._stride == 0:
            self._kept.append(self.last)
        self._seen += 1
        if len(self._kept) == 2 * _MIN_POINTS:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    @property
    def points(self) -> Points:
        return self._kept if self._kept[-1:] == [self.last] else [*self._kept, self.last]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from what the run directory holds.

    Raises UserError when that is not a run, or a file of it is damaged, TandemError when the report cannot be written.
    """
    names = ("config.yaml", "environment.json", "summary.json")
    files = {name: read_text(run_dir / name) for name in names if (run_dir / name).exists()}
    if "config.yaml" not in files:
        raise UserError(f"{run_dir}: not a run directory (no config.yaml)")
    config = stored_run(run_dir)
    if config.model is None:
        raise DamagedFile(run_dir / "config.yaml", "not the configuration of a run (no model.path)")
    curves = _curves(run_dir / "metrics.jsonl")
    shown = {
        "title": f"{_kind(config, curves).upper()} · {run_dir.resolve().name}",
        "model": config.model.path,
        "summary": {} if files.pop("summary.json", None) is None else _summary(run_dir / "summary.json"),
        "facts": _facts(curves),
        "sections": _sections(curves),
        "samples": samples(_trajectories(run_dir, curves), PictureStore(pictures_of_run(run_dir))),
        "settings": files,
    }
    embedded = json.dumps(shown).replace("<", "\\u003c")  # nothing in it can end the script element
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    report = run_dir / "report.html"
    try:
        write_text(report, template.replace("{RUN}", embedded))
    except OSError as error:
        raise TandemError(f"{report}: the report cannot be written ({error}); the run itself is whole") from None
    return report


def _summary(path: Path) -> dict[str, Any]:
    summary = read_json(path, dict[str, Any])
    try:
        json.dumps(summary, allow_nan=False)  # a page reads no NaN
    except ValueError:
        raise DamagedFile(path, "a number in it is not finite") from None
    return summary


def _kind(config: StoredRun, curves: dict[str, Curve]) -> str:
    """What was trained: the algorithm, the loss on pairs, or what the metrics say."""
    if config.algorithm is not None:
        return config.algorithm.type
    if config.preference is not None:
        return config.preference.loss
    return "reward model" if "reward_model/loss" in curves else "sft"


def _curves(metrics: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in each_record(metrics):
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                curves.setdefault(name, Curve()).add(record["step"], value)
    return curves


def _trajectories(run_dir: Path, curves: dict[str, Curve]) -> list[Path]:
    """Without those of steps that the run lost: it has begun again before them, and has not come to them since."""
    last = max((curve.last[0] for curve in curves.values()), default=math.inf)
    return [path for step, path in files_by_step(run_dir / "trajectories").items() if step <= last]


def _facts(curves: dict[str, Curve]) -> dict[str, float]:
    facts = {name: curves[name].last[1] for name in _LAST_VALUES if name in curves}
    facts |= {f"best {name}": curve.largest for name, curve in curves.items() if "/acc/mean@" in name}
    return {"last step": max(curve.last[0] for curve in curves.values()), **facts} if curves else {}


def _sections(curves: dict[str, Curve]) -> dict[str, dict[str, dict[str, Points]]]:
    """Heading -> chart -> curve: every metric once, beside those that it is best compared with."""
    sections: dict[str, dict[str, dict[str, Points]]] = {heading: {} for heading in _SECTIONS}
    for name, curve in curves.items():
        parent, _, last = name.rpartition("/")
        compared = last in ("mean", "min", "max") or "@" in last or parent == "time"
        chart, label = (parent, last) if compared else (name, "")
        first = name.partition("/")[0]
        charts = sections.setdefault(_MERGED.get(first, first), {})
        charts.setdefault(chart, {})[label] = curve.points
    return {heading: dict(sorted(charts.items())) for heading, charts in sections.items() if charts}
