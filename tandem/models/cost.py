"""What a row costs a model: the measure by which rows are balanced over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True, slots=True)
class RowCost:
    """The multiply-adds of a forward pass, as a sum over tokens; a backward pass takes twice as many.

        cost = token * tokens + predicted * predicted tokens + sum over windows of (pair * pairs within the window)

    A pair is a token and one that it attends to, itself included. The default counts tokens alone.
    """

    token: float = 1.0
    """Of the layers' matrices, by token that is fed."""
    predicted: float = 0.0
    """Of the output layer, by token whose log-prob or value is wanted."""
    pairs: tuple[tuple[int | None, float], ...] = ()
    """(Window in tokens, None: all that came before; multiply-adds a pair), summed over layers."""

    def of_tokens(self, starts: Ints, stops: Ints) -> Floats:
        """By row: the cost of feeding its tokens at `start` to `stop`, those before them in the row being there."""
        attention = [pair * (_pairs(stops, window) - _pairs(starts, window)) for window, pair in self.pairs]
        return np.sum([self.token * (stops - starts), *attention], axis=0)


TOKENS_ALONE = RowCost()
"""Every token costs the same."""


def _pairs(tokens: Ints, window: int | None) -> Floats:
    """How many pairs the first so many tokens of a row have."""
    growing = tokens if window is None else np.minimum(tokens, window)
    pairs: Floats = growing * (growing + 1) / 2
    return pairs if window is None else pairs + (tokens - growing) * float(window)


def row_cost(config: PreTrainedConfig, value_head: bool) -> RowCost:
    """By the sizes in a model's configuration; without routers, norms and biases, which change no balance."""
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = 2 * text.hidden_size * head_dim * (heads + kv_heads)
    feed_forward = 3 * text.hidden_size * _active_width(text)
    kinds: list[str] = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    sliding = sum("sliding" in kind for kind in kinds)
    windows = [(None, len(kinds) - sliding), (getattr(text, "sliding_window", None), sliding)]
    return RowCost(
        token=float(text.num_hidden_layers * (attention + feed_forward)),
        predicted=0.0 if value_head else float(text.vocab_size * text.hidden_size),
        pairs=tuple((window, 2.0 * heads * head_dim * layers) for window, layers in windows if layers),
    )


def _active_width(text: Any) -> int:
    """Of the feed-forward layers that a token goes through."""
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    active = getattr(text, "num_experts_per_tok", None) or 0
    return active * (getattr(text, "moe_intermediate_size", None) or dense) if active else dense
