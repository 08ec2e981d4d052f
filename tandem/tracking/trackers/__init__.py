"""The trackers that `tracking` turns on, one a file: the key of `tracking` is the name of the file.

A file has a section with its options and a `Tracker`. Every file is imported when a configuration is read, so a package
that may be missing is imported in the tracker's `__init__`, and not at the top.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.config.base import Section
from tandem.discovery import class_named
from tandem.tracking.base import Tracker

if TYPE_CHECKING:
    from tandem.config.tracking import TrackingConfig


def make_trackers(config: TrackingConfig, run_dir: Path, first_step: int) -> list[Tracker]:
    """Every tracker that is turned on; `first_step`: where a resumed run starts."""
    trackers: list[Tracker] = []
    for name, kind in tracker_kinds(config).items():
        given = getattr(config, name)
        options = class_named(__name__, name, Section)() if given is True else given
        trackers.append(cast(Any, kind)(options, run_dir, first_step))
    return trackers


def tracker_kinds(config: TrackingConfig) -> dict[str, type[Tracker]]:
    """The classes of the trackers that are turned on, by their names."""
    return {name: class_named(__name__, name, Tracker) for name, given in config if given is not False}
