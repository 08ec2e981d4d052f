"""What every section of the typed tree is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

__all__ = ["NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt", "Section", "Share"]

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
