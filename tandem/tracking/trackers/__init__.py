"""The trackers that `tracking` turns on, one a file: the key of `tracking` is the name of the file.

A file has a section with its options, a `TrackerConfig`, and a `Tracker`. Every file is imported when a configuration
is read, so the package is imported inside the tracker's methods, and not at the top.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from inspect import isabstract
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tandem.config.trackers import OwnTrackerConfig, TrackerConfig
from tandem.discovery import class_named
from tandem.errors import UserError
from tandem.files import load_named
from tandem.tracking.base import TrackedRun, Tracker

if TYPE_CHECKING:
    from tandem.config.tracking import TrackingConfig


class ChosenTracker(NamedTuple):
    """A tracker that is turned on."""

    name: str
    """How files and messages call it: the key of `tracking`, or `own-Class`."""
    key: str
    """Where the configuration turns it on."""
    options: TrackerConfig

    def kind(self) -> type[Tracker]:
        """Raises UserError where a class of the user's own is none."""
        if isinstance(self.options, OwnTrackerConfig):
            return _own_kind(self.options.tracker)
        return class_named(__name__, self.name, Tracker)

    def given(self) -> Any:
        """The options as the class takes them."""
        return self.options.options if isinstance(self.options, OwnTrackerConfig) else self.options

    def make(self, run: TrackedRun) -> Tracker:
        return cast(Any, self.kind())(self.given(), run)


def chosen_trackers(config: TrackingConfig) -> Iterator[ChosenTracker]:
    """Every tracker that is turned on, those of the user's own last."""
    for name, given in config:
        if name != "own" and given is not False:
            options = class_named(__name__, name, TrackerConfig)() if given is True else given
            yield ChosenTracker(name, f"tracking.{name}", options)
    seen: set[str] = set()
    for number, form in enumerate(config.own):
        options = OwnTrackerConfig(tracker=form) if isinstance(form, str) else form
        name = f"own-{options.tracker.rpartition(':')[2]}"
        name = f"{name}-{number}" if name in seen else name
        seen.add(name)
        yield ChosenTracker(name, f"tracking.own[{number}]", options)


def _own_kind(reference: str) -> type[Tracker]:
    kind = load_named(reference, "tracker")
    place, _, name = reference.rpartition(":")
    if kind is None:
        module = load_named(f"{place}:__dict__", "tracker")
        near = get_close_matches(name, [key for key, value in module.items() if isinstance(value, type)], 1)
        raise UserError(f"{place} has no class {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise UserError(f"{reference} is no subclass of tandem.Tracker")
    if isabstract(kind):
        raise UserError(f"{reference} lacks {', '.join(sorted(kind.__abstractmethods__))} of tandem.Tracker")
    return kind
