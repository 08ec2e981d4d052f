"""Decoding steps recorded once as CUDA graphs and replayed: a GPU runs a step's kernels faster than they are launched.

A graph fixes shapes and addresses. So rows are rounded up, what fills the batch up writes to a page that is nobody's,
where rows end and which pages they have is read from memory, and graphs are forgotten when pages or their table have
moved, or weights have before a batch begins or with a publish. Nobody may move them while rows are under way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.lean import lay_out
from tandem.models.pages import PagedCache, PagedDecode
from tandem.types import IntArray

Forward = Callable[[Tensor, PagedDecode, Tensor], Tensor]
"""Token ids `[1, B]`, their plan, and the positions that are encoded, `[B]`, to logits `[B, V]`."""
_ROWS = 32
"""Rows are rounded up to a power of two, from here on to a multiple."""


class RecordedSteps:
    """The decoding steps of one model and one cache. Elsewhere than on a GPU the same steps run unrecorded."""

    def __init__(self, forward: Forward, model: PreTrainedModel, cache: PagedCache) -> None:
        """`model`: what `forward` runs."""
        self._forward = forward
        self._model = model
        self._cache = cache
        self._addresses: list[int] = []
        self._forget(())

    def look_for_moves(self) -> None:
        """Forget what reads weights that have moved. To be called before the first step, and before the next one after
        anything that may have moved them: looking at each of them takes as long as a step."""
        if self._addresses == (addresses := self._weights()):
            return
        if lay_out(self._model):
            addresses = self._weights()
        self._forget(())
        self._addresses = addresses

    def _weights(self) -> list[int]:
        return [weight.data_ptr() for weight in (*self._model.parameters(), *self._model.buffers())]

    def __call__(self, token_B: IntArray, position_B: IntArray, lag_B: IntArray) -> Tensor:
        """Logits `[B, V]` of the next token in each of the first B slots, good until the next call.

        `position_B`: where in their rows the tokens stand, whose pages are there; `lag_B`: by how much the positions
        encoded differ.
        """
        cache, count = self._cache, len(token_B)
        if cache.place != self._place:
            self._forget(cache.place)
        rounded = 1 << (count - 1).bit_length() if count <= _ROWS else -(-count // _ROWS) * _ROWS
        rows = min(rounded, cache.slots)
        inputs = np.zeros((3, rows), dtype=np.int64)
        inputs[:, :count] = token_B, position_B, lag_B
        if rows not in self._steps:
            self._steps[rows] = self._prepare(torch.from_numpy(inputs).to(cache.table.device))
        fixed, run = self._steps[rows]
        fixed.copy_(torch.from_numpy(inputs))
        return run()[:count]

    def _forget(self, place: tuple[int, ...]) -> None:
        self._place = place
        """`PagedCache.place`."""
        self._steps: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        """By rows: where the inputs go, int64 `[3, rows]` tokens, positions, lags; and what computes."""
        self._logits: Tensor | None = None
        self._pool: Any = None

    def _prepare(self, inputs: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The step is run once on `inputs`, which must therefore be those of the rows."""
        tokens, positions, lags, rows = inputs[:1], inputs[1], inputs[2], inputs.shape[1]

        def compute() -> Tensor:
            return self._forward(tokens, self._cache.decode(positions), positions + lags)

        if not _can_record(inputs.device):
            return inputs, compute
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what libraries allocate at their first use must not be recorded
            first = compute()
        torch.cuda.current_stream().wait_stream(side)
        if self._logits is None:  # outside the graphs' memory, which they share
            self._logits = first.new_empty(self._cache.slots, first.shape[1])
            self._pool = torch.cuda.graph_pool_handle()
        logits, graph = self._logits[:rows], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits.copy_(compute())

        def replay() -> Tensor:
            graph.replay()
            return logits

        return inputs, replay


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda"
