"""Trackio, on this machine, on a server of one's own or in a Hugging Face Space."""

# The package is not in the environment that types are checked in (scripts/trackers-env).
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from tandem.config.trackers import TrackerConfig
from tandem.tracking.base import COLUMNS, Ended, Sample, TrackedRun, Tracker

if TYPE_CHECKING:
    from tandem.types import StepMetrics


class TrackioConfig(TrackerConfig):
    """Trackio (the extra `trackio`). Secrets are TRACKIO_WRITE_TOKEN of a server, and HF_TOKEN or `hf auth login`."""

    project: str = "tandem"
    name: str | None = None
    """Of the run; one of that name is gone on with. Default: the name of its directory and digits of its own."""
    group: str | None = None
    space_id: str | None = None
    """A Hugging Face Space, `user/name`. Without it and `server_url`: files of this machine (TRACKIO_DIR)."""
    server_url: str | None = None

    @field_validator("server_url")
    @classmethod
    def _holds_no_token(cls, server_url: str | None) -> str | None:
        if server_url and "write_token" in server_url:
            raise ValueError("the URL holds a token, and config.yaml would; set TRACKIO_WRITE_TOKEN")
        return server_url


class TrackioTracker(Tracker):
    """A run of a name that is unique. Its own record says what the last step was: values are written half a second
    after they are logged. Samples are in the row of their step."""

    package = "trackio"

    @classmethod
    def check(cls, options: TrackioConfig) -> Iterator[str]:
        if options.server_url and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            yield "server_url: the server's token is missing; set TRACKIO_WRITE_TOKEN"
        if options.space_id:
            from huggingface_hub import get_token

            if get_token() is None:
                yield "space_id: no token is set; set HF_TOKEN or run `hf auth login`"

    def __init__(self, options: TrackioConfig, run: TrackedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=options.project,
            name=options.name or f"{run.name}-{run.id[:6]}",
            group=options.group,
            space_id=options.space_id,
            server_url=options.server_url,
            config={**run.config, "environment": run.environment},
            resume="allow",
            embed=False,
        )
        self.last_step = self._run._next_step - 1
        self._samples: dict[str, Any] = {}

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:
        rows = [sample.row for sample in samples]
        self._samples[table] = self._table(columns=[*COLUMNS], data=rows)

    def log(self, step: int, metrics: StepMetrics) -> None:
        self._run.log({**metrics, **self._samples}, step=step)
        self._samples = {}

    def close(self, ended: Ended) -> None:
        self._run.finish()
