"""Weights & Biases, at its server or offline."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.trackers import TrackerConfig
from tandem.tracking.base import COLUMNS, Ended, Sample, TrackedRun, Tracker

if TYPE_CHECKING:
    from tandem.types import StepMetrics

_MEND = "set WANDB_API_KEY, run `wandb login`, or write tracking.wandb.mode: offline"
_CAPTION = 80
"""Characters of an answer under its picture."""
_BLOCK, _HEADER, _FILE_HEADER = 32 * 1024, 7, 7


class WandbConfig(TrackerConfig):
    """Weights & Biases (the extra `wandb`). The API key is WANDB_API_KEY, or that of `wandb login`."""

    project: str = "tandem"
    entity: str | None = None
    """User or team. Default: that of the API key."""
    name: str | None = None
    """Of the run. Default: the name of its directory."""
    group: str | None = None
    tags: list[str] = []
    notes: str | None = None
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to `<run_dir>/wandb` alone, for `wandb sync`. Default: WANDB_MODE, else online."""

    def is_offline(self) -> bool:
        return (self.mode or os.environ.get("WANDB_MODE", "online")) != "online"


class WandbTracker(Tracker):
    """A run whose id is kept in the run directory. Offline each process writes a folder of its own with that id, which
    `wandb sync` makes one run of."""

    package = "wandb"

    @classmethod
    def check(cls, options: WandbConfig) -> Iterator[str]:
        """An API key that is missing, malformed or refused."""
        if options.is_offline():
            return
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        try:
            if not wandb.login(prompt=False, verify=True):
                yield f"no API key is set; {_MEND}"
        except (AuthenticationError, UsageError) as error:
            if "did not respond" not in str(error):  # nobody is there now; the run goes on without
                yield f"{error}; {_MEND}"

    def __init__(self, options: WandbConfig, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",  # what a run prints is not parted from its progress bar
            silent=True,
            init_timeout=options.close_timeout_s,  # the process does not end before this has
            finish_timeout=options.close_timeout_s,
            disable_git=True,  # environment.json names the revision; a remote's URL may hold a password
            x_disable_meta=False,
            x_transaction_log_flush_interval=0.2,  # what is not flushed a killed process loses
        )
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or run.name,
            group=options.group,
            tags=options.tags or None,
            notes=options.notes,
            id=run.id,
            resume="allow",
            mode="offline" if options.is_offline() else "online",
            dir=str(run.directory),
            config={**run.config, "environment": run.environment},
            settings=settings,
        )
        self._table, self._image = wandb.Table, wandb.Image
        self.last_step = _last_offline_step(run.directory, run.id) if options.is_offline() else self._run.step - 1

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:
        rows: list[Any] = [[step, *sample.row] for sample in samples]
        shown: dict[str, Any] = {table: self._table(columns=["step", *COLUMNS], data=rows)}
        pictures = [
            self._image(pixels, caption=f"row {number}: {sample.answer[:_CAPTION]}")
            for number, sample in enumerate(samples)
            for pixels in sample.pictures
        ]
        if pictures:
            shown[f"{table}_pictures"] = pictures
        self._run.log(shown, step=step, commit=False)

    def log(self, step: int, metrics: StepMetrics) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=1 if ended == "failed" else 0)


def _last_offline_step(run_dir: Path, run_id: str) -> int:
    """The last step in the files of an offline run, in whichever process it was written; -1: none."""
    files = (run_dir / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((step for path in files for step in offline_steps(path)), default=-1)


def offline_steps(path: Path) -> Iterator[int]:
    """The steps in a `.wandb` file, in its order."""
    for row in offline_history(path):
        yield int(row["_step"])


def offline_history(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged, a row a step, of a `.wandb` file: a log in LevelDB's format, whose entries are messages
    `Record`. The package has no reader of it."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    for entry in log_entries(path.read_bytes()):
        record = Record.FromString(entry)
        if record.HasField("history"):
            yield {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def log_entries(log: bytes) -> Iterator[bytes]:
    """The whole entries of a log in LevelDB's format (log_format.md), as far as it was written: blocks of 32 KiB, of
    chunks `checksum, length, type`; an entry is a chunk (type 1), or a first, middle ones and a last (2, 3, 4)."""
    place, entry = _FILE_HEADER, b""
    while place + _HEADER <= len(log):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:  # zeros fill the block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        chunk = log[place + _HEADER : place + _HEADER + length]
        if kind == 0 or len(chunk) < length:
            return
        entry = chunk if kind in (1, 2) else entry + chunk
        if kind in (1, 4):
            yield entry
        place += _HEADER + length
