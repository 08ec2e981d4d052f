"""The section `data.val_sets`: several sets of validation rows, each answered in its own way."""

from typing import Annotated

from pydantic import AfterValidator, Field

from tandem.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from tandem.config.generation import EvalSamplingConfig
from tandem.config.paths import DataPaths
from tandem.types import check_temperature


class ValSetConfig(Section):
    """One validation set. What is null is as `generation.eval` says."""

    files: DataPaths = Field(min_length=1)
    """As `data.val_files`."""
    temperature: Annotated[NonNegativeFloat, AfterValidator(check_temperature)] | None = None
    top_p: Annotated[PositiveFloat, Field(le=1)] | None = None
    samples: PositiveInt | None = None
    max_response_tokens: PositiveInt | None = None

    def sampling(self, usual: EvalSamplingConfig) -> EvalSamplingConfig:
        """`usual` but for what this set says itself."""
        own = {name: getattr(self, name) for name in EvalSamplingConfig.model_fields}
        return usual.model_copy(update={name: value for name, value in own.items() if value is not None})
