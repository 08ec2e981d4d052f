"""metrics.jsonl: one JSON object a step, the record that every other view is made from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tandem.types import StepMetrics


class JsonlTracker:
    """Appends `{"step": n, "<metric>": number, …}`, one whole line a step. Values that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+")
        if self._ends_torn():
            self._file.write(b"\n")
            self._file.flush()

    def log(self, step: int, metrics: StepMetrics) -> None:
        record = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _ends_torn(self) -> bool:
        """A process killed while writing leaves a line without its end."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records, ascending by step; null reads as NaN.

    The last record of a step wins, since a resumed run repeats the steps after its checkpoint. Torn lines are left out.
    """
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash; the step was repeated, or is lost
            continue
        if isinstance(record, dict) and "step" in record:
            records[record["step"]] = {key: math.nan if value is None else value for key, value in record.items()}
    return [records[step] for step in sorted(records)]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
