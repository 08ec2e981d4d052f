"""Decoding steps recorded once as CUDA graphs and replayed: a GPU runs a step's kernels faster than they are launched.

A graph fixes shapes and addresses. So rows and attended lengths are rounded up, what fills the batch up writes to slots
that hold no row, a graph keeps what it reads, and graphs are forgotten when the cache has grown, or weights have moved
before a batch begins or with a publish. Nobody may move them while rows are under way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.models.kv_cache import Decode, KVCache
from tandem.types import IntArray

Forward = Callable[[Tensor, Decode, Tensor], Tensor]
"""Token ids `[1, B]`, their plan, and the positions that are encoded, `[B]`, to logits `[B, V]`."""
_ROWS, _LENGTH = 32, 256
"""Rows are rounded up to a power of two, from here on to a multiple; lengths to a multiple."""


class RecordedSteps:
    """The decoding steps of one model and one cache. Elsewhere than on a GPU the same steps run unrecorded."""

    def __init__(self, forward: Forward, model: nn.Module, cache: KVCache) -> None:
        """`model`: what `forward` runs."""
        self._forward = forward
        self._model = model
        self._cache = cache
        self._addresses: list[int] = []
        self.look_for_moves()

    def look_for_moves(self) -> None:
        """Forget what reads weights that have moved. To be called before the next step after anything that may have
        moved them: looking at each of them takes as long as a step."""
        weights = [*self._model.parameters(), *self._model.buffers()]
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:
            self._forget(())
        self._addresses, self._device = addresses, weights[0].device

    def __call__(self, token_B: IntArray, position_B: IntArray, lag_B: IntArray) -> Tensor:
        """Logits `[B, V]` of the next token in each of the first B slots, good until the next call.

        `position_B`: where in their rows the tokens stand; `lag_B`: by how much the positions encoded differ.
        """
        cache, count = self._cache, len(token_B)
        place = (cache.slots, cache.length)
        if place != self._place:
            self._forget(place)
        rounded = 1 << (count - 1).bit_length() if count <= _ROWS else -(-count // _ROWS) * _ROWS
        rows = min(rounded, cache.slots)
        length = min(-(-(int(position_B.max()) + 1) // _LENGTH) * _LENGTH, cache.length)
        inputs = np.zeros((3, rows), dtype=np.int64)
        inputs[:, :count] = token_B, position_B, lag_B
        if (rows, length) not in self._steps:
            self._steps[rows, length] = self._prepare(torch.from_numpy(inputs).to(self._device), length)
        fixed, run = self._steps[rows, length]
        fixed.copy_(torch.from_numpy(inputs))
        return run()[:count]

    def _forget(self, place: tuple[int, ...]) -> None:
        self._place = place
        """How large the cache is: it moves when it grows."""
        self._steps: dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]] = {}
        """By rows and length: where the inputs go, int64 `[3, rows]` tokens, positions, lags; and what computes."""
        self._read: list[Tensor] = []
        """What the graphs read besides, which the cache may forget before they are."""
        self._logits: Tensor | None = None
        self._pool: Any = None

    def _prepare(self, inputs: Tensor, length: int) -> tuple[Tensor, Callable[[], Tensor]]:
        """The step is run once on `inputs`, which must therefore be those of the rows."""
        tokens, positions, lags, rows = inputs[:1], inputs[1], inputs[2], inputs.shape[1]

        def compute(plan: Decode) -> Tensor:
            return self._forward(tokens, plan, positions + lags)

        def plan() -> Decode:
            return Decode(self._cache, positions, 1, length)

        if not _can_record(inputs.device):
            return inputs, lambda: compute(plan())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what libraries allocate at their first use must not be recorded
            first = compute(plan())
        torch.cuda.current_stream().wait_stream(side)
        if self._logits is None:  # outside the graphs' memory, which they share
            self._logits = first.new_empty(self._cache.slots, first.shape[1])
            self._pool = torch.cuda.graph_pool_handle()
        logits, graph, recorded = self._logits[:rows], torch.cuda.CUDAGraph(), plan()
        with torch.cuda.graph(graph, pool=self._pool):
            logits.copy_(compute(recorded))

        self._read += recorded.read  # of the plan no more: what else it holds lies in the memory that graphs share

        def replay() -> Tensor:
            graph.replay()
            return logits

        return inputs, replay


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda"
