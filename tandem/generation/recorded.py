"""Decoding steps recorded once as CUDA graphs and replayed: a GPU runs a step's kernels faster than they are launched.

A step takes the rows' state from memory, chooses the next tokens and leaves the state one token on, so that until a row
comes or goes the host sends nothing but new lines of the page table, and reads tokens and log-probs in one copy.

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

from tandem.generation.native_rows import DecodeBatch
from tandem.generation.native_steps import Chosen, Forward
from tandem.generation.sampling import Array
from tandem.models.kernels import with_triton
from tandem.models.kernels.drawing import FIELDS, choose_
from tandem.models.lean import lay_out
from tandem.models.pages import PagedCache

_ROWS = 32
"""Rows are rounded up to a power of two, from here on to a multiple."""
_OF_ROWS = {"token": "last"}
"""What fields of the device's state are called in that of rows, where it is not the same."""


class RecordedSteps:
    """The decoding steps of one model over pages. Elsewhere than on a GPU the same steps run unrecorded."""

    def __init__(
        self, forward: Forward, model: PreTrainedModel, cache: PagedCache, never: Tensor | None, *, record: bool
    ) -> None:
        """`model`: what `forward` runs; `never`: tokens that are not drawn."""
        self._forward = forward
        self._model = model
        self._cache = cache
        self._never = never
        self._record = record
        self._addresses: list[int] = []
        self._forget(())

    def look_for_moves(self) -> None:
        """Forget what reads weights that have moved: looking at each of them takes as long as a step."""
        if self._addresses == (addresses := self._weights()):
            return
        if lay_out(self._model):
            addresses = self._weights()
        self._forget(())
        self._addresses = addresses

    def _weights(self) -> list[int]:
        return [weight.data_ptr() for weight in (*self._model.parameters(), *self._model.buffers())]

    def decode(self, batch: DecodeBatch) -> Chosen:
        cache, count = self._cache, len(batch.state)
        cache.grow(batch.state["position"])
        if cache.place != self._place:
            self._forget(cache.place)
        rows = self._rounded(count)
        if rows not in self._steps:
            self._send(batch, rows)  # a step is run to prepare it, whose rows must be there, and takes them on
            self._steps[rows], self._sent = self._prepare(rows), None
        if self._sent is not batch:
            self._send(batch, rows)
        logits_BV = self._steps[rows]()
        return _chosen(self._chosen_B2[:count], logits_BV[:count])

    def choose(self, batch: DecodeBatch, logits_BV: Tensor) -> Chosen:
        state_8B = torch.from_numpy(_packed(batch.state, len(batch.state))).to(logits_BV.device)
        chosen_B2 = torch.empty(len(batch.state), 2, dtype=torch.float64, device=logits_BV.device)
        choose_(logits_BV, state_8B, chosen_B2, self._never)
        return _chosen(chosen_B2, logits_BV)

    def _rounded(self, count: int) -> int:
        if not self._record:
            return count
        rounded = 1 << (count - 1).bit_length() if count <= _ROWS else -(-count // _ROWS) * _ROWS
        return min(rounded, self._cache.slots)

    def _send(self, batch: DecodeBatch, rows: int) -> None:
        self._state_8B[:, :rows] = torch.from_numpy(_packed(batch.state, rows))
        self._sent = batch

    def _forget(self, place: tuple[int, ...]) -> None:
        self._place = place
        """`PagedCache.place`."""
        self._steps: dict[int, Callable[[], Tensor]] = {}
        """By rows, what runs a step of the first slots; returns logits."""
        slots, device = self._cache.slots, self._cache.table.device
        self._state_8B = torch.zeros(len(FIELDS), slots, dtype=torch.int64, device=device)
        self._chosen_B2 = torch.zeros(slots, 2, dtype=torch.float64, device=device)
        self._sent: DecodeBatch | None = None
        """The batch whose state is on the device, taken on with every step; it is another when a row comes or goes."""
        self._logits: Tensor | None = None
        self._pool: Any = None

    def _prepare(self, rows: int) -> Callable[[], Tensor]:
        state_8B, chosen_B2 = self._state_8B[:, :rows], self._chosen_B2[:rows]
        token_B, position_B, lag_B, *_ = state_8B

        def compute() -> Tensor:
            logits = self._forward(token_B[None], self._cache.decode(position_B), position_B + lag_B)
            choose_(logits, state_8B, chosen_B2, self._never)
            return logits

        if not self._record or not _can_record(state_8B):
            return compute
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with (
            torch.cuda.stream(side),
            self._cache.states.unchanged(rows),
        ):  # what libraries allocate at their first use must not be recorded
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

        return replay


def _packed(state: Array, rows: int) -> Array:
    """`FIELDS` of rows, int64 `[8, rows]`; what fills them up is no row."""
    packed = np.zeros((len(FIELDS), rows), dtype=np.int64)
    packed[FIELDS.index("made")] = -1
    for field, values in zip(FIELDS, packed, strict=True):
        values[: len(state)] = np.ascontiguousarray(state[_OF_ROWS.get(field, field)]).view(np.int64)
    return packed


def _chosen(chosen_B2: Tensor, logits_BV: Tensor) -> Chosen:
    token_B, logprob_B = chosen_B2.cpu().numpy().T
    return Chosen(token_B.astype(np.int64), logprob_B.astype(np.float32), logits_BV)


def _can_record(tensor: Tensor) -> bool:
    """What stands in for kernels asks the host for sizes."""
    return with_triton(tensor)
