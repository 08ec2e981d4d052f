"""What every section of the typed tree is made of."""

from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveInt

__all__ = [
    "MAY_CHANGE",
    "MayChange",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "Share",
    "by_type",
]

T = TypeVar("T")
MAY_CHANGE = "may change on resume"
MayChange = Annotated[T, MAY_CHANGE]
"""The kind of a key, or of a whole section, that a resumed run may give another value: `timeout_s: MayChange[float]`.

Every other key is fixed for the length of a run, because it decides what the run learns. See `tandem/config/resume.py`.
"""

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def by_type(default: str) -> Discriminator:
    """Tells the sections of a union apart by their `type`, which a file may leave out where it is `default`."""

    def tag(section: object) -> str:
        if isinstance(section, dict):
            return str(cast(dict[str, Any], section).get("type", default))
        return str(getattr(section, "type", None))

    return Discriminator(tag)
