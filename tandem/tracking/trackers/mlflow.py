"""MLflow, at a tracking server or in files."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import field_validator

from tandem.config.paths import absolute
from tandem.config.trackers import TrackerConfig
from tandem.tracking.base import COLUMNS, Ended, Sample, TrackedRun, Tracker
from tandem.tracking.described import flattened
from tandem.types import StepMetrics

_RUN_TAG, _STEP_TAG = "tandem.run", "tandem.step"
_AT_ONCE = 900
"""Metrics of one call; the server refuses more than 1,000 values in all."""
_LONGEST_PARAMETER = 6000
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowConfig(TrackerConfig):
    """MLflow (the extra `mlflow`). A server's secrets are MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN."""

    uri: str | None = None
    """`http://…` of a server, `sqlite:///file.db` (for which the whole of MLflow must be installed), or a directory.
    Default: MLFLOW_TRACKING_URI, else `<run_dir>/mlflow`."""
    experiment: str = "tandem"
    name: str | None = None
    """Of the run. Default: the name of its directory."""
    tags: dict[str, str] = {}

    @field_validator("uri")
    @classmethod
    def _whole_and_without_password(cls, uri: str | None) -> str | None:
        if uri and not urlsplit(uri).scheme and not uri.startswith("databricks"):
            return str(absolute(Path(uri)))
        if uri and urlsplit(uri).password is not None:
            raise ValueError("the URL holds a password, and config.yaml would; set MLFLOW_TRACKING_USERNAME and "
                             "MLFLOW_TRACKING_PASSWORD")  # fmt: skip
        return uri

    def place(self) -> str | None:
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI")


class MlflowTracker(Tracker):
    """A run that is found again by a tag; another tag is the last step. Names keep what MLflow allows in them:
    `acc/mean@4` is `acc/mean_at_4`. Tables are JSON files among the artifacts."""

    package = "mlflow"

    @classmethod
    def check(cls, options: MlflowConfig) -> Iterator[str]:
        place = options.place() or ""
        scheme = urlsplit(place).scheme
        if scheme in ("sqlite", "mysql", "postgresql", "mssql") and find_spec("sqlalchemy") is None:
            yield f"uri: {scheme}:// needs the whole of MLflow (pip install mlflow); a directory and a server do not"

    def __init__(self, options: MlflowConfig, run: TrackedRun) -> None:
        place = options.place() or str(run.directory.resolve() / "mlflow")
        if not urlsplit(place).scheme or place.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it files are refused as old-fashioned
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        self._client = client = MlflowClient(tracking_uri=place)
        found = client.get_experiment_by_name(options.experiment)
        experiment = found.experiment_id if found else client.create_experiment(options.experiment)
        same = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.id}'")
        if same:
            self._id = same[0].info.run_id
            self.last_step = int(same[0].data.tags.get(_STEP_TAG, -1))
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {**options.tags, _RUN_TAG: run.id}
            self._id = client.create_run(experiment, tags=tags, run_name=options.name or run.name).info.run_id
            self.last_step = -1
        settings = [Param(_named(key), str(value)[:_LONGEST_PARAMETER]) for key, value in flattened(run.config).items()]
        known = same[0].data.params if same else {}
        new = [setting for setting in settings if setting.key not in known]  # a parameter keeps its first value
        for first in range(0, len(new), 100):
            client.log_batch(self._id, params=new[first : first + 100])
        client.log_dict(self._id, run.config, "config.yaml")
        client.log_dict(self._id, run.environment, "environment.json")

    def log_samples(self, step: int, table: str, samples: Sequence[Sample]) -> None:
        shown = {"columns": COLUMNS, "data": [sample.row for sample in samples]}
        self._client.log_text(self._id, json.dumps(shown), f"{table}/step_{step:06d}.json")

    def log(self, step: int, metrics: StepMetrics) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_named(name), value, now, step) for name, value in metrics.items()]
        for first in range(0, len(values), _AT_ONCE):
            last = first + _AT_ONCE >= len(values)
            tags = [self._tag(_STEP_TAG, str(step))] if last else []
            self._client.log_batch(self._id, metrics=values[first : first + _AT_ONCE], tags=tags)

    def close(self, ended: Ended) -> None:
        self._client.set_terminated(self._id, _STATUS[ended])


def _named(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
