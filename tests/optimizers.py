"""The optimizers of the folder: each is held to what every optimizer owes."""

from tandem.config.optimizer import OptimizerConfig
from tandem.config.sections import FoundIn

OPTIMIZERS: dict[str, type[OptimizerConfig]] = FoundIn("tandem.training.optimizers").sections(OptimizerConfig)
