"""The numbers of a state mixer that decide what it costs, from a config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.model_files import STATE_LAYERS

_CHUNK = 64
"""Tokens whose products with one another are computed at once."""


@dataclass(frozen=True, slots=True)
class MixerShape:
    """One layer's."""

    parameters: int
    conv: int
    """Numbers of the state of its convolution, in the model's dtype."""
    recurrent: int
    """Numbers of its recurrent state, in float32."""
    flops: int
    """Of a token's forward pass, beside those of its matrices."""

    def state_bytes(self, item_bytes: int) -> int:
        """Of one row, whatever its length."""
        return self.conv * item_bytes + 4 * self.recurrent


def gated_delta_net(config: Mapping[str, Any]) -> MixerShape:
    """Yang et al. 2024, arXiv:2412.06464, as Qwen3-Next and Qwen3.5 have it."""
    hidden, kernel = config["hidden_size"], config.get("linear_conv_kernel_dim", 4)
    heads, key, value = (
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )
    channels = 2 * config["linear_num_key_heads"] * key + heads * value
    projections = hidden * (channels + heads * value + 2 * heads) + heads * value * hidden
    in_chunks = 4 * _CHUNK * (key + value)
    return MixerShape(
        parameters=projections + channels * kernel + 2 * heads + value,
        conv=channels * kernel,
        recurrent=heads * key * value,
        flops=heads * (6 * key * value + in_chunks) + 2 * channels * kernel,
    )


def mixing_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """By layer: whether it has a mixer in the place of attention."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(kind in STATE_LAYERS for kind in kinds[:layers])
    interval = config.get("full_attention_interval", 4)
    return tuple((index + 1) % interval > 0 for index in range(layers))
