"""SwanLab, at its server or offline."""

# The package is not in the environment that types are checked in (scripts/trackers-env).
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tandem.config.trackers import TrackerConfig
from tandem.tracking.base import COLUMNS, Ended, Sample, TrackedRun, Tracker

if TYPE_CHECKING:
    from tandem.types import StepMetrics

_MEND = "set SWANLAB_API_KEY, run `swanlab login`, or write tracking.swanlab.mode: offline"
_STATE: dict[Ended, Any] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanlabConfig(TrackerConfig):
    """SwanLab (the extra `swanlab`). The API key is SWANLAB_API_KEY, or that of `swanlab login`."""

    project: str = "tandem"
    workspace: str | None = None
    """Default: that of the API key."""
    name: str | None = None
    """Of the run. Default: the name of its directory."""
    group: str | None = None
    tags: list[str] = []
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to `<run_dir>/swanlab` alone, for `swanlab sync`. Default: SWANLAB_MODE, else online."""

    def is_offline(self) -> bool:
        return (self.mode or os.environ.get("SWANLAB_MODE", "online")) != "online"


class SwanlabTracker(Tracker):
    """A run whose id is kept in the run directory. Offline each process writes a folder of its own with that id. What a
    killed process has not flushed of its last step is sent again, value by value."""

    package = "swanlab"

    @classmethod
    def check(cls, options: SwanlabConfig) -> Iterator[str]:
        """An API key that is missing or refused; the package does not tell a key that is refused from no connection."""
        if options.is_offline():
            return
        import swanlab
        from swanlab.exceptions import AuthenticationError

        settings = swanlab.Settings()
        if settings.api_key is not None and not _answers(settings.api_host):
            return
        try:
            swanlab.login()
        except AuthenticationError as error:
            yield f"{error} {_MEND}"

    def __init__(self, options: SwanlabConfig, run: TrackedRun) -> None:
        import swanlab

        self._package = swanlab
        folder = run.directory / "swanlab"
        there = _offline_values(folder, run.id) if options.is_offline() else None
        settings = swanlab.Settings.model_validate(
            # what a run prints is not parted from its progress bar; the remote of a clone may hold a password
            {"terminal": {"proxy_type": "none"}, "probe": {"git": False}, "interactive": False}
        )
        self._run = swanlab.init(
            reinit=True,
            log_dir=str(folder),
            mode="offline" if options.is_offline() else "online",
            workspace=options.workspace,
            project=options.project,
            name=options.name or run.name,
            group=options.group,
            tags=options.tags or None,
            id=run.id,
            resume="allow",
            config={**run.config, "environment": run.environment},
            settings=settings,
        )
        self._there: set[tuple[int, str]] = set()
        if there is not None:
            last = max((step for step, _ in there), default=0)
            self._there = {value for value in there if value[0] == last}
            self.last_step = last - 1

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:
        if (step, table) not in self._there:
            rows = [sample.row for sample in samples]
            shown = self._package.echarts.Table().add([*COLUMNS], rows)
            self._run.log({table: shown}, step=step)

    def log(self, step: int, metrics: StepMetrics) -> None:
        new = {name: float(value) for name, value in metrics.items() if (step, name) not in self._there}
        if new:
            self._run.log(new, step=step)

    def close(self, ended: Ended) -> None:
        error = "an error ended the run; its output says which" if ended == "failed" else None
        self._run.finish(state=_STATE[ended], error=error)


def _answers(url: str) -> bool:
    place = urlsplit(url)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), timeout=3).close()
    except OSError:
        return False
    return True


def _offline_values(folder: Path, run_id: str) -> set[tuple[int, str]]:
    """Step and name of every value in the files of an offline run, in whichever process it was written."""
    return {
        (record.step, record.key)
        for path in folder.glob(f"run-*-{run_id}/run-{run_id}.swanlab")
        for record in offline_records(path)
    }


def offline_records(path: Path) -> Iterator[Any]:
    """The scalars and tables in a `.swanlab` file, as far as it was written, by the package's own reader."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreError, DataStoreReader

    reader = DataStoreReader()
    if not path.stat().st_size:
        return
    reader.open(path)
    try:
        while (entry := reader.scan()) is not None:
            record = Record.FromString(entry)
            for kind in ("scalar", "media"):
                if record.HasField(kind):
                    yield getattr(record, kind)
    except (DataStoreError, AssertionError):  # a crash has torn the end
        return
    finally:
        reader.close()
