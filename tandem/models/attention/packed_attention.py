"""The plan for segments head to tail, no cache: what training, scoring and prefilling pass to a model."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.models.attention.kernel_choice import kernel_for
from tandem.models.attention.pieces import KernelCall, Piece, Scoring, attend, gathered, shared_prefixes, tokens_before
from tandem.models.attention.rectangles import Cpu
from tandem.models.mixing import MixedRows, State, StateMixer
from tandem.types import IntArray

_WORTH_A_PIECE = 512
"""Tokens. On a CPU the keys of a shorter prompt are copied before each answer's: less work than a second piece."""


class PackedRows:
    """A segment may continue another, its prefix, whose keys stand before its own."""

    def __init__(
        self, offsets: IntArray, device: torch.device | str = "cpu", prefixes: IntArray | None = None, computed: int = 0
    ) -> None:
        """`offsets`: int64 `[segments + 1]`; `prefixes`: int64 `[segments]`, as in MicroBatch (None: no prefixes).

        `computed`: the first so many segments are prefixes that an earlier pass has computed. They are tokens of key
        and value alone: queries and positions are of the segments after them.
        """
        lengths = np.diff(offsets)
        self._offsets, self._computed = offsets, computed
        self._prefixes = np.full(len(lengths), -1) if prefixes is None else prefixes
        self._before = tokens_before(offsets, self._prefixes)
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - self._before, lengths)
        self.positions = torch.from_numpy(positions[int(offsets[computed]) :]).to(device)
        """int64 `[N]`: how many tokens each sees before itself."""
        self._longest = int((self._before + lengths)[computed:].max())
        self._calls: dict[_Kind, list[KernelCall]] = {}
        self._mixed: dict[tuple[torch.device, bool], MixedRows] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        window = scoring.window if scoring.window is not None and scoring.window < self._longest else None
        width, of_values = query.shape[-1], value.shape[-1]
        # A flash kernel has one head_dim, a multiple of 8, for queries, keys and values.
        wide = -(-max(width, of_values) // 8) * 8
        q, k, v = (pad(x[0].transpose(0, 1), (0, wide - x.shape[-1])) if x.shape[-1] < wide else x[0].transpose(0, 1)
                   for x in (query, key, value))  # fmt: skip
        calls = self._for(_Kind(window, scoring.cap, query.device, query.dtype, wide))
        if scoring.sinks is None and len(calls) == 1 and isinstance(calls[0], Cpu):
            output = calls[0].attend(q, k, v, scoring.scale)
        else:
            output = attend(q, k, v, calls, scoring.scale, scoring.sinks)
        return output[None, ..., :of_values]

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        return self._rows_of_states(hidden.device, keeps_states=False).run(mixer, hidden[0])[0][None]

    def mix_and_keep(self, mixer: StateMixer, hidden: Tensor, given: State | None = None) -> tuple[Tensor, State]:
        """As `mix`, without gradients, and the states after each segment that is computed; `given`: those after the
        segments that an earlier pass has computed."""
        output, after = self._rows_of_states(hidden.device, keeps_states=True).run(mixer, hidden[0], given)
        assert after is not None
        return output[None], after

    def _rows_of_states(self, device: torch.device, *, keeps_states: bool) -> MixedRows:
        if (device, keeps_states) not in self._mixed:
            made = MixedRows(self._offsets, self._prefixes, device, self._computed, keeps_states=keeps_states)
            self._mixed[device, keeps_states] = made
        return self._mixed[device, keeps_states]

    def _for(self, kind: "_Kind") -> list[KernelCall]:
        if kind not in self._calls:
            kernel = kernel_for(kind.device, kind.dtype, kind.head_dim, kind.cap, self._longest)
            self._calls[kind] = [kernel(piece, kind.device) for piece in self._pieces(kind)]
        return self._calls[kind]

    def _pieces(self, kind: "_Kind") -> list[Piece]:
        if kind.window is not None:
            return gathered(self._offsets, self._prefixes, kind.window, self._computed)
        continued = self._before[self._before > 0]
        if kind.device.type == "cpu" and len(continued) and continued.mean() < _WORTH_A_PIECE:
            return gathered(self._offsets, self._prefixes, None, self._computed)
        return shared_prefixes(self._offsets, self._prefixes, self._computed)


class _Kind(NamedTuple):
    """What the calls of a layer depend on."""

    window: int | None
    cap: float | None
    device: torch.device
    dtype: torch.dtype
    head_dim: int
