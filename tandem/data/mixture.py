"""The sampler of a run, and how many rows each set of a mixture has."""

from itertools import islice
from typing import Any, Protocol

from tandem.config.data import DataConfig, DataFilesConfig
from tandem.data.dataset import Dataset, RLHFDataset
from tandem.data.sampler import MixtureSampler, Sampler
from tandem.errors import UserError


def set_sizes(config: DataFilesConfig, dataset: Dataset[Any, Any]) -> dict[str, int]:
    """Rows of each set of `data.mixture`, from a data set of its files. Raises UserError where one has none left."""
    counts = iter(dataset.items_of_files)
    sizes = {name: sum(islice(counts, len(one.files))) for name, one in config.mixture.items()}
    if empty := [name for name, rows in sizes.items() if rows == 0]:
        raise UserError(f"data.mixture: no usable row is left in {', '.join(empty)}; mend their rows, or remove them")
    return sizes


class MakesSampler(Protocol):
    """The section `data.sampler`."""

    def make(self, config: DataConfig, dataset: RLHFDataset, seed: int) -> Sampler:
        """The sampler of a run on the rows of `dataset`, whose columns are in the `row` of each of its prompts. Called
        before anything is started; raises UserError where it cannot be made."""
        ...


def make_sampler(config: DataConfig, dataset: RLHFDataset, seed: int) -> Sampler:
    """The order in which a run uses the rows of `config.train_paths`. Raises UserError for a class that is none, and
    for sets without a row."""
    section: Any = config.sampler
    made: MakesSampler = section
    return made.make(config, dataset, seed)


def sampler_of_epochs(config: DataFilesConfig, dataset: Dataset[Any, Any], rows_per_step: int, seed: int) -> Sampler:
    """Every row once before any comes again, of each set in its share. Raises UserError for sets without a row."""
    if not config.mixture:
        return Sampler(len(dataset), rows_per_step, config.shuffle, seed)
    weights = [one.weight for one in config.mixture.values()]
    return MixtureSampler(set_sizes(config, dataset), weights, rows_per_step, config.shuffle, seed)
