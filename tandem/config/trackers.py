"""What the trackers that `tracking` turns on have in common, and those of the user's own."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag, field_validator

from tandem.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from tandem.config.paths import Reference

_SECRET = {"key", "apikey", "password", "secret", "token"}


class TrackerConfig(Section):
    """Any tracker."""

    samples_every: NonNegativeInt = 10
    """A table of answers (prompt, answer, reward, advantage) after so many steps, where `trainer.trajectories_every`
    has their trajectories written; and one of each validation. 0: none."""
    samples: PositiveInt = 8
    """Rows of a table: the best answer, the worst, and some between."""
    close_timeout_s: PositiveFloat = 30.0
    """How long the end of a run waits for a tracker to take what it has not yet taken."""


class OwnTrackerConfig(TrackerConfig):
    """A tracker of your own."""

    tracker: Reference
    """`path/to/file.py:Class` or `package.module:Class`: a subclass of `tandem.Tracker`."""
    options: dict[str, Any] = {}
    """What the class is given. They are written to config.yaml: secrets belong in environment variables."""

    @field_validator("options")
    @classmethod
    def _holds_no_secret(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if _SECRET & set(name.lower().split("_")):
                raise ValueError(f"{name}: looks like a secret, and config.yaml would hold it; read it from os.environ")
        return options


def _form(tracker: object) -> str:
    return "reference" if isinstance(tracker, str) else "with_options"


OwnTracker = Annotated[
    Annotated[OwnTrackerConfig, Tag("with_options")] | Annotated[Reference, Tag("reference")], Discriminator(_form)
]
