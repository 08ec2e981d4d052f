"""What those who look at a run read of its config.yaml, which may be that of another version of Tandem."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tandem.stored import read_yaml


class _Part(BaseModel):
    """Keys that are not named here are not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)


class StoredTrainer(_Part):
    """Of the section `trainer`."""

    steps: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None


class _Model(_Part):
    path: str


class _Algorithm(_Part):
    type: str


class _Preference(_Part):
    loss: str


class _Images(_Part):
    directory: str | None = None


class _Data(_Part):
    images: _Images | None = None


class StoredRun(_Part):
    """Sections that the run's kind of training does not have are None."""

    trainer: StoredTrainer | None = None
    model: _Model | None = None
    algorithm: _Algorithm | None = None
    preference: _Preference | None = None
    data: _Data | None = None


def stored_run(run: Path) -> StoredRun:
    """Raises DamagedFile where the run's config.yaml is none."""
    return read_yaml(run / "config.yaml", StoredRun)


def pictures_of_run(run: Path) -> Path:
    """Where the pictures of a run's rows are; of a directory that is no run, where they would be."""
    described = stored_run(run) if (run / "config.yaml").exists() else StoredRun()
    images = described.data.images if described.data is not None else None
    return Path(images.directory) if images is not None and images.directory is not None else run / "pictures"
