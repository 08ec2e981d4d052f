"""AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) is torch's; it moves every master that no other does."""

from typing import Literal

from tandem.config.optimizer import OptimizerConfig


class AdamWConfig(OptimizerConfig):
    """Two float32 moments, 8 bytes a parameter."""

    type: Literal["adamw"] = "adamw"
