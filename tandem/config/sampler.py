"""The section `data.sampler`: which row is drawn next."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from tandem.config.base import PositiveFloat, Section, by_type
from tandem.config.paths import Reference


class EpochsSamplerConfig(Section):
    """Every row once before any comes again, in an order of `trainer.seed`."""

    type: Literal["epochs"] = "epochs"


class SolveRateSamplerConfig(Section):
    """Rows that are solved neither always nor never come more often (docs/data.md)."""

    type: Literal["solve_rate"]
    discount: Annotated[PositiveFloat, Field(le=1)] = 0.5
    """What is known of a row counts so much less each time that it is drawn again, for the policy has changed."""


class OwnSamplerConfig(Section):
    """A class of your own (docs/data.md)."""

    type: Literal["own"]
    sampler: Reference
    """`path/to/file.py:Class` or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """What it is made with, by name."""


SamplerConfig = Annotated[
    Annotated[EpochsSamplerConfig, Tag("epochs")]
    | Annotated[SolveRateSamplerConfig, Tag("solve_rate")]
    | Annotated[OwnSamplerConfig, Tag("own")],
    by_type("epochs"),
]
