"""metrics.jsonl: one JSON object a step, the record that every other view is made from."""

import json
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.files import writing
from tandem.stored import DamagedFile, parse_json
from tandem.tracking.base import Ended, Recorder
from tandem.types import StepMetrics


class JsonlRecorder(Recorder):
    """Appends a line a step; the file exists from the first one on. Values that are not finite become null.

    Raises DamagedFile where the file that is there cannot be read, TandemError where a line cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and _last_byte(path) not in (b"", b"\n"):
            self._append("\n")  # a process killed while writing left a line without its end

    def log(self, step: int, metrics: StepMetrics) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._append(json.dumps({"step": step, **finite}) + "\n")

    def close(self, ended: Ended) -> None: ...

    def _append(self, text: str) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _last_byte(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read(1)
    except OSError as error:
        raise DamagedFile(path, f"cannot be read ({error.strerror})") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All of `each_record`. Raises DamagedFile as that does."""
    return list(each_record(path))


def each_record(path: Path) -> Iterator[dict[str, Any]]:
    """The records, by step; null reads as NaN. A run that began again after an earlier step has lost what came after
    it, and tells of it anew when it gets there. None where there is no file.

    The file is read twice, so that of a long run only steps and places are held. Raises DamagedFile where a line is no
    record, nor what a crash leaves of one.
    """
    if not path.exists():
        return
    steps, places, place = array("q"), array("q"), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = _record(path, number, line)
                if record is not None:
                    while steps and steps[-1] >= record["step"]:
                        steps.pop()
                        places.pop()
                    steps.append(record["step"])
                    places.append(place)
                place += len(line)
            for start in places:
                file.seek(start)
                record = record_of(file.readline())
                assert record is not None
                yield record
    except OSError as error:
        raise DamagedFile(path, f"cannot be read ({error.strerror or error})") from None


def _record(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    try:
        return record_of(line)
    except ValueError as error:
        raise DamagedFile(path, f"line {number} is no record of a step ({error})", "delete that line") from None


def record_of(line: bytes) -> dict[str, Any] | None:
    """None: a crash has torn the line, of a process or of the machine; its step was repeated, or is lost. Raises
    ValueError where it is no record."""
    try:
        record = parse_json(line)
    except ValueError as error:
        if not line.strip() or line.startswith(b"{") or b"\0" in line:
            return None
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        raise ValueError("it is no object with a whole number `step`")
    return {key: _number(key, value) for key, value in record.items()}


def _number(name: str, value: Any) -> Any:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or (type(value) is int and abs(value) >= 2**63):
        raise ValueError(f"{name} is no number, but {value!r:.80}")
    return value
