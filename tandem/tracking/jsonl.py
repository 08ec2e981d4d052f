"""metrics.jsonl: one JSON object a step, the record that every other view is made from."""

import json
import math
from pathlib import Path
from typing import Any

from tandem.tracking.base import Ended, Recorder
from tandem.types import StepMetrics


class JsonlTracker(Recorder):
    """Appends a line a step; the file exists from the first one on. Values that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._append("\n")  # a process killed while writing left a line without its end

    def log(self, step: int, metrics: StepMetrics) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._append(json.dumps({"step": step, **finite}) + "\n")

    def close(self, ended: Ended) -> None: ...

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records, by step; null reads as NaN. A run that began again after an earlier step has lost what came after
    it, and tells of it anew when it gets there."""
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        record = record_of(line)
        if record is None:
            continue
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return records


def record_of(line: bytes) -> dict[str, Any] | None:
    """None: a crash has torn the line; its step was repeated, or is lost."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return {key: math.nan if value is None else value for key, value in record.items()}
