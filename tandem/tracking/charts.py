"""Line charts as inline SVG: no library, no script; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 410, 10, 186
_COLORS = 8
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: (step, finite value), ascending by step."""

    name: str
    points: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels; `low` and `high` are ticks."""

    low: float
    high: float
    tick: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [self.low + i * self.tick for i in range(round((self.high - self.low) / self.tick) + 1)]


def figure(title: str, series: Sequence[Series], band: tuple[Series, Series] | None = None) -> str:
    """A `<figure>`: curves with legend, axes and a tooltip a step; `band` shades what lies between two curves."""
    thinned = [Series(s.name, _thin(s.points)) for s in series]
    edges = [Series(s.name, _thin(s.points)) for s in band] if band else []
    every = [*thinned, *edges]
    steps = sorted({step for one in every for step, _ in one.points})
    x, y = _step_axis(steps), _value_axis([value for one in every for _, value in one.points])
    drawn = [_grid(x, y), _shade(edges, x, y), *(_curve(i, s, x, y) for i, s in enumerate(thinned))]
    label = escape(f"{title}: {', '.join(s.name for s in every)}")
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{_legend(title, series, band)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}{_tooltips(every, steps, x)}</svg></figure>"
    )


def number(value: float) -> str:
    """Three or four digits, whatever the size: 0.0312, 12.3k, 1.5e-6."""
    size = abs(value)
    if size >= 1e4:
        for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= power:
                return f"{value / power:.3g}{unit}" if size < 1e12 else f"{value:.2e}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `_MAX_POINTS`: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= _MAX_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def _step_axis(steps: list[int]) -> _Axis:
    low, high = steps[0], steps[-1]
    if low == high:
        return _Axis(low - 1, high + 1, 1, _LEFT, _RIGHT)
    return _Axis(low, high, max(1, _nice(low, high, 5)), _LEFT, _RIGHT)


def _value_axis(values: list[float]) -> _Axis:
    """From tick to tick; zero is included unless the values lie far from it."""
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low <= 0.6 * high else low
    high = 0.0 if 0.6 * low <= high <= 0 else high
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0 * (low == 0)
    tick = _nice(low, high, 5)
    return _Axis(math.floor(low / tick + 1e-9) * tick, math.ceil(high / tick - 1e-9) * tick, tick, _BOTTOM, _TOP)


def _nice(low: float, high: float, intervals: int) -> float:
    """The distance of ticks, 1, 2 or 5 times a power of ten, for about `intervals` of them."""
    raw = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def _grid(x: _Axis, y: _Axis) -> str:
    lines = [
        f'<line class="{"zero" if abs(v) < y.tick / 2 else "grid"}" x1="{_LEFT}" x2="{_RIGHT}" '
        f'y1="{y(v):.1f}" y2="{y(v):.1f}"/><text class="y" x="{_LEFT - 6}" y="{y(v) + 3.5:.1f}">{_tick(v, y)}</text>'
        for v in y.ticks()
    ]
    first = math.ceil(x.low / x.tick) * int(x.tick)
    marks = [
        f'<text class="x" x="{x(step):.1f}" y="{_BOTTOM + 16}">{number(step)}</text>'
        for step in range(first, math.floor(x.high) + 1, int(x.tick))
    ]
    return "".join([*lines, *marks])


def _tick(value: float, axis: _Axis) -> str:
    """All labels of an axis in one notation, without digits that the distance of ticks does not call for."""
    if abs(value) < axis.tick / 2:
        return "0"
    if not 1e-2 <= max(abs(axis.low), abs(axis.high)) < 1e4:
        return number(value)
    return f"{value:.{max(0, -math.floor(math.log10(axis.tick) + 1e-9))}f}"


def _shade(edges: list[Series], x: _Axis, y: _Axis) -> str:
    if not edges:
        return ""
    low, high = edges
    outline = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in [*low.points, *reversed(high.points)])
    return f'<polygon class="band" points="{outline}"/>'


def _curve(index: int, series: Series, x: _Axis, y: _Axis) -> str:
    color = f"s{index % _COLORS}"
    at = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in series.points]
    line = f'<polyline class="{color}" points="{" ".join(map(",".join, at))}"/>'
    dots = [f'<circle class="{color}" cx="{cx}" cy="{cy}" r="2.2"/>' for cx, cy in at] if len(at) <= 30 else []
    return "".join([line, *dots])


def _tooltips(series: list[Series], steps: list[int], x: _Axis) -> str:
    """An invisible column around each step that tells all its values on hover."""
    values = [(one.name, dict(one.points)) for one in series]
    middles = [(x(a) + x(b)) / 2 for a, b in pairwise(steps)]
    columns: list[str] = []
    for step, left, right in zip(steps, [_LEFT - 4, *middles], [*middles, _RIGHT + 4], strict=True):
        told = [f"{escape(name)} {number(at[step])}" for name, at in values if step in at]
        text = "\n".join([f"step {step}", *told])
        columns.append(
            f'<rect class="hit" x="{left:.1f}" width="{right - left:.1f}" y="{_TOP}" height="{_BOTTOM - _TOP}">'
            f"<title>{text}</title></rect>"
        )
    return "".join(columns)


def _legend(title: str, series: Sequence[Series], band: tuple[Series, Series] | None) -> str:
    """Name and last value of each curve."""
    told = [(f"s{index % _COLORS}", s.name, number(s.points[-1][1])) for index, s in enumerate(series)]
    if band:
        told.append(("band", "min – max", " – ".join(number(s.points[-1][1]) for s in band)))
    return "".join(
        f'<span><i class="{color}"></i>{"" if name == title else escape(name)} <em>{last}</em></span>'
        for color, name, last in told
    )
