"""Every row once before any comes again."""

from typing import TYPE_CHECKING, Literal

from tandem.config.sampler import SamplerKind

if TYPE_CHECKING:
    from tandem.config.data import DataConfig
    from tandem.data.dataset import RLHFDataset
    from tandem.data.sampler import Sampler


class EpochsSamplerConfig(SamplerKind):
    """Every row once before any comes again, in an order of `trainer.seed`."""

    type: Literal["epochs"] = "epochs"

    def make(self, config: "DataConfig", dataset: "RLHFDataset", seed: int) -> "Sampler":
        from tandem.data.mixture import sampler_of_epochs

        return sampler_of_epochs(config, dataset, config.prompts_per_step, seed)
