"""The section `data.sampler`: which row is drawn next."""

from collections.abc import Iterator
from typing import Annotated, Any

from tandem.config.base import Section
from tandem.config.sections import FoundIn, of_usual_type


class SamplerKind(Section):
    """Any order of rows. The kinds are in tandem/data/samplers, one a file."""

    type: Any

    def find_mistakes(self) -> Iterator[str]:
        """What is wrong with what it names; found before rows are read, and nothing is made of it."""
        yield from ()


SamplerConfig = Annotated[SamplerKind, FoundIn("tandem.data.samplers"), of_usual_type("epochs")]
