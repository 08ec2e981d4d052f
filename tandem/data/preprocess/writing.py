"""Parquet files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.data.rows import Row


def write_parquet(rows: list[Row], path: Path) -> int:
    """Write `rows` to `path`, replacing it at once or not at all; equal rows give equal bytes. Returns their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(pa.Table.from_pylist(rows), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(rows)
