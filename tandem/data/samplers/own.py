"""An order of rows by a class of the user's own."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.paths import Reference
from tandem.config.sampler import SamplerKind
from tandem.errors import UserError

if TYPE_CHECKING:
    from tandem.config.data import DataConfig
    from tandem.data.dataset import RLHFDataset
    from tandem.data.sampler import Sampler


class OwnSamplerConfig(SamplerKind):
    """A class of your own (docs/data.md)."""

    type: Literal["own"]
    sampler: Reference
    """`path/to/file.py:Class` or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """What it is made with, by name."""

    def find_mistakes(self) -> Iterator[str]:
        from tandem.data.classes import sampler_class

        try:
            sampler_class(self.sampler)
        except UserError as error:
            yield str(error)

    def make(self, config: "DataConfig", dataset: "RLHFDataset", seed: int) -> "Sampler":
        from tandem.data.learning_sampler import load_sampler

        return load_sampler(self.sampler, self.arguments, len(dataset), config.prompts_per_step, seed)
