"""What a check measures, and how a check ends: lines of `figures.jsonl`.

A file holds one line for the machine, a line for each figure as soon as it is known, and a line for the end of each
check. `kind` says which of them a line is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, FAILED, TIMED_OUT, KILLED, SKIPPED, NOT_BEGUN = "ok", "FAILED", "TIMED OUT", "KILLED", "skipped", "not begun"
"""How a check ends. Skipped: the machine lacks something, and the reason says what; not begun: no time was left."""
BAD = FAILED, TIMED_OUT, KILLED


class Skipped(Exception):
    """A check raises it with the reason where the machine lacks what it needs."""


@dataclass(frozen=True)
class Machine:
    """Where and when a run of the checks took place."""

    date: str
    commit: str
    card: str = "no GPU"
    torch: str = "unknown"
    versions: str = ""
    """Of driver, Python, transformers and Triton, in words."""


@dataclass(frozen=True)
class Figure:
    check: str
    name: str
    value: float | str
    unit: str = ""
    case: str = ""
    """Which of several sizes or variants."""
    published: float | None = None
    """What somebody else has published for the same quantity, in the same unit."""
    source: str = ""
    """Who published it, and on which card."""

    @property
    def text(self) -> str:
        return (shown(self.value) + f" {self.unit}").rstrip()

    @property
    def published_text(self) -> str:
        return "" if self.published is None else f"{shown(self.published)} {self.unit}".rstrip() + f" ({self.source})"


@dataclass(frozen=True)
class End:
    check: str
    state: str
    seconds: float
    reason: str = ""
    """Why the check was skipped, or what its last error was."""


Record = Machine | Figure | End
KINDS: dict[str, type[Record]] = {kind.__name__.lower(): kind for kind in (Machine, Figure, End)}


def to_line(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__.lower(), **asdict(record)}, ensure_ascii=False)


def from_line(line: str) -> Record:
    fields: dict[str, Any] = json.loads(line)
    return KINDS[fields.pop("kind")](**fields)


def read(path: Path) -> list[Record]:
    """The records of a file; a last line that was cut off, as by a full disk or a power cut, is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [from_line(line) for line in lines if line.endswith("\n")]


def shown(value: float | str) -> str:
    """Four significant digits; thousands are separated."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Bench:
    """What a check gets."""

    name: str
    small: bool
    """Sizes for a CPU, on which only the code is tried; otherwise those of a GPU, on it."""
    work: Path
    """A temporary folder that all checks share."""
    send: Callable[[Record], None]

    def report(self, name: str, value: float | str, unit: str = "", case: str = "") -> None:
        """Make a figure known, at once. What is published for it stands in `published.py`."""
        from gpu_checks.published import PUBLISHED

        known = None if self.small else PUBLISHED.get((self.name, name, case))
        published, source = known or (None, "")
        number = value if isinstance(value, str) else float(value)
        self.send(Figure(self.name, name, number, unit, case, published, source))

    def report_all(self, figures: Iterable[tuple[str, float | str, str]], case: str = "") -> None:
        """Of (name, value, unit)."""
        for name, value, unit in figures:
            self.report(name, value, unit, case)
