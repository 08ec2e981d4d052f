"""A step of the native engine: the rows' last tokens through the model, and their next ones chosen.

There are two kinds: `PlainSteps` here, as a CPU is fast at, and `RecordedSteps` (recorded.py), as a GPU is.

Suffixes: `_B` rows, `_N` tokens of one forward pass, `_V` vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.generation.native_rows import DecodeBatch, DecodeSlots
from tandem.generation.sampling import Array, Chooser
from tandem.models.kv_cache import Decode, KVCache
from tandem.types import IntArray

Forward = Callable[[Tensor, Any, Tensor], Tensor]
"""Token ids `[1, N]`, their plan, and the positions that are encoded, `[N]`, to logits `[N, V]`."""


class Chosen(NamedTuple):
    """The next tokens of some rows."""

    token_B: IntArray
    logprob_B: Array
    """Float32 log softmax(logits / temperature), before top-k and top-p."""
    logits_BV: Tensor
    """What the tokens were chosen from, good until the next call of the steps."""


class DecodingSteps(Protocol):
    """The steps of one model and one cache."""

    def decode(self, batch: DecodeBatch) -> Chosen:
        """Run the last tokens of all rows, the first slots, through the model, and choose the next ones."""
        ...

    def choose(self, batch: DecodeBatch, logits_BV: Tensor) -> Chosen:
        """Choose the first tokens of rows, by the logits that their prompts end in."""
        ...

    def look_for_moves(self) -> None:
        """To be called before the first step, and before the next one after anything that may have moved weights."""
        ...


class PlainSteps:
    """Over one tensor of keys and values a layer; rows with the same tokens so far are computed once."""

    def __init__(
        self, forward: Forward, cache: KVCache, rows: DecodeSlots, never: Tensor | None, device: torch.device
    ) -> None:
        self._forward, self._cache, self._rows = forward, cache, rows
        self._never, self._device = never, device
        self._known: tuple[DecodeBatch, Chooser] | None = None
        """A chooser is good as long as no row comes or goes."""

    def look_for_moves(self) -> None:
        """Nothing here holds weights."""

    def decode(self, batch: DecodeBatch) -> Chosen:
        state = batch.state
        position_B, alike = state["position"], self._rows.alike()
        plan = Decode(self._cache, self._tensor(position_B), int(position_B.min()) + 1, int(position_B.max()) + 1)
        if alike is None:
            rows, like_B = state, None
        else:
            rows, like_B = state[alike[0]], self._tensor(alike[1])
            plan.share(self._tensor(alike[0]), like_B)
        stands_N = self._tensor(rows["position"] + rows["lag"]) if rows["lag"].any() else plan.position_N
        logits = self._forward(self._tensor(rows["last"])[None], plan, stands_N)
        return self.choose(batch, logits if like_B is None else logits.index_select(0, like_B))

    def choose(self, batch: DecodeBatch, logits_BV: Tensor) -> Chosen:
        if self._known is None or self._known[0] is not batch:
            self._known = batch, Chooser(batch.state, self._device, self._never)
        kept_BV = logits_BV.clone() if len(batch.top) else logits_BV  # choosing overwrites them
        token_B, logprob_B = self._known[1](logits_BV)
        return Chosen(token_B.cpu().numpy(), logprob_B.cpu().numpy(), kept_BV)

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
