"""What every section of the typed tree is made of."""

from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

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


def _refuse_switch(value: T) -> T:
    """`save_every: true` would be 1."""
    if isinstance(value, bool):
        raise ValueError("input should be a number")
    return value


_NO_SWITCH = BeforeValidator(_refuse_switch)
PositiveInt = Annotated[int, Field(gt=0), _NO_SWITCH]
PositiveFloat = Annotated[float, Field(gt=0), _NO_SWITCH]
NonNegativeInt = Annotated[int, Field(ge=0), _NO_SWITCH]
NonNegativeFloat = Annotated[float, Field(ge=0), _NO_SWITCH]
Share = Annotated[float, Field(ge=0, le=1), _NO_SWITCH]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading.

    A section is compiled when it is first validated: a command needs few of those that are declared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def by_type(default: str) -> Discriminator:
    """Tells the sections of a union apart by their `type`, which a file may leave out where it is `default`."""

    def tag(section: object) -> str:
        if isinstance(section, dict):
            return str(cast(dict[str, Any], section).get("type", default))
        return str(getattr(section, "type", None))

    return Discriminator(tag)
