"""The section `data.sampler`: which row is drawn next."""

from collections.abc import Iterator
from typing import Annotated, Any, cast

from pydantic import BeforeValidator

from tandem.config.base import Section
from tandem.config.sections import FoundIn


class SamplerKind(Section):
    """Any order of rows. The kinds are in tandem/data/samplers, one a file."""

    type: Any

    def find_mistakes(self) -> Iterator[str]:
        """What is wrong with what it names; found before rows are read, and nothing is made of it."""
        yield from ()


def _of_usual_type(given: Any) -> Any:
    return {"type": "epochs", **cast(dict[str, Any], given)} if isinstance(given, dict) else given


SamplerConfig = Annotated[SamplerKind, FoundIn("tandem.data.samplers"), BeforeValidator(_of_usual_type)]
