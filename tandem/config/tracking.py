"""The section `tracking`: a key for each file in `tandem/tracking/trackers`, which turns that tracker on."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag, create_model

from tandem.config.base import Section
from tandem.config.trackers import OwnTracker, TrackerConfig
from tandem.discovery import classes_of, modules_in


def _switch_or_section(given: object) -> str:
    return "with_options" if isinstance(given, dict | Section) else "switch"


def _trackers() -> dict[str, Any]:
    """Key to (kind, default), from the one section of each file."""
    found: dict[str, Any] = {}
    for module in modules_in("tandem.tracking.trackers"):
        (section,) = classes_of(module, TrackerConfig)
        needed = [name for name, field in section.model_fields.items() if field.is_required()]
        assert not needed, f"{section.__name__}: {needed} need defaults, for `true` turns the tracker on"
        switch: Any = Annotated[bool, Tag("switch")]
        either = Annotated[switch | Annotated[section, Tag("with_options")], Discriminator(_switch_or_section)]
        found[module.__name__.rpartition(".")[2]] = (either, False)
    return found


class _Tracking(Section):
    own: list[OwnTracker] = []
    """Trackers of your own: each `path/to/file.py:Class`, or that with options (docs/tracking.md)."""


if TYPE_CHECKING:

    class TrackingConfig(_Tracking): ...

else:
    TrackingConfig = create_model("TrackingConfig", __base__=_Tracking, __module__=__name__, **_trackers())
    TrackingConfig.__doc__ = "Where metrics go besides `metrics.jsonl` and the console; `true`, or a tracker's options."
