"""A data set of several named sets: how many rows each has, and the sampler that takes them in turns."""

from itertools import islice

from tandem.config.tree import DataConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.sampler import MixtureSampler, Sampler
from tandem.errors import UserError


def set_sizes(config: DataConfig, dataset: RLHFDataset) -> dict[str, int]:
    """Rows of each set of `data.mixture`, from a data set of its files. Raises UserError where one has none left."""
    counts = iter(dataset.items_of_files)
    sizes = {name: sum(islice(counts, len(one.files))) for name, one in config.mixture.items()}
    if empty := [name for name, rows in sizes.items() if rows == 0]:
        raise UserError(f"data.mixture: no usable row is left in {', '.join(empty)}; mend their rows, or remove them")
    return sizes


def make_sampler(config: DataConfig, dataset: RLHFDataset, seed: int) -> Sampler:
    """The order in which a run uses the rows of `config.train_paths`."""
    if not config.mixture:
        return Sampler(len(dataset), config.prompts_per_step, config.shuffle, seed)
    weights = [one.weight for one in config.mixture.values()]
    return MixtureSampler(set_sizes(config, dataset), weights, config.prompts_per_step, config.shuffle, seed)
