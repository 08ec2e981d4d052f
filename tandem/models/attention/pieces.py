"""Attention over packed rows without masks: a union of pieces, each one call of a variable-length flash kernel.

A micro-batch is segments head to tail; an answer's segment continues a prompt's, its prefix. Two pieces say all of it:

    own     every segment over itself                     causal        all queries, all keys
    prefix  all answers of a prompt over that prompt      not causal    the answers' queries, the prompts' keys

Prefixes of prefixes take a piece for each level of their tree. A layer with a sliding window takes one piece instead:
each segment over the last `window - 1` tokens of its prefix and over itself, gathered.

The pieces' outputs are merged by their log-sum-exps. Backward calls each piece's kernel with the merged output O and
the merged log-sum-exp L. That is exact, because a key's gradient knows the other keys through these two alone:

    p_j = exp(s_j - L)     D = sum_j p_j <dO, v_j> = <dO, O>     dv_j = p_j dO     ds_j = p_j (<dO, v_j> - D)

and a query's gradient is the sum over the pieces. Autograd through such a merge would be wrong: flash kernels take no
gradient of the log-sum-exp. A sink is a logit without a value: one more term of L, whose gradient is -p D.

Suffixes: `_N` tokens. Shapes: queries, keys, values and outputs `[tokens, heads, head_dim]`, log-sum-exps
`[heads, tokens]` in float32 (float64 where the queries are).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from tandem.types import IntArray

Place = slice | IntArray
"""Which of the tokens: side by side, or one by one."""


def on_device(place: Place, device: torch.device) -> slice | Tensor:
    return place if isinstance(place, slice) else torch.from_numpy(place).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Segment i of the queries sees segment i of the keys. No segment is empty, and every token stands in one."""

    queries: Place
    keys: Place
    query_lengths: IntArray
    key_lengths: IntArray
    causal: bool
    """The last query of a segment sees its last key, the one before it all but the last, and so on."""
    window: int | None = None
    """How many of the latest keys a query sees; only where `causal`."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does with the products of queries and keys: `softmax(cap * tanh(scale * q k / cap))`."""

    scale: float
    window: int | None = None
    """How many of the latest tokens a query sees, itself among them; None: all."""
    sinks: Tensor | None = None
    """`[heads]`: logits that take a share of each softmax and give no value (Xiao et al. 2023, arXiv:2309.17453)."""
    cap: float | None = None


Part = tuple["slice | Tensor", Tensor]
"""Tokens, as a slice or as int64 places, and what is to be added to their gradient."""


class KernelCall(Protocol):
    """A piece as one kernel computes it."""

    queries: slice | Tensor
    """Those of all queries that `forward` gives outputs for."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of the piece's queries, from all queries, keys and values."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Part, Part, Part]:
        """Gradients of queries, keys and values, where all queries' `output` and `lse` are over other keys too."""
        ...


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        calls: Sequence[KernelCall],
        scale: float,
    ) -> Tensor:
        first, *others = calls
        output, lse = first.forward(query, key, value, scale)
        for call in others:
            output, lse = _merged(output, lse, call.queries, *call.forward(query, key, value, scale))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            output, lse = (output * _shares(lse, total)).to(output.dtype), total
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.calls, ctx.scale = calls, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        grad = gradients[0].contiguous()
        totals: list[Tensor | None] = [None, None, None]
        for call in ctx.calls:
            parts = call.backward(grad, query, key, value, output, lse, ctx.scale)
            for number, (like, part) in enumerate(zip((query, key, value), parts, strict=True)):
                totals[number] = _added(totals[number], like, *part)
        grad_sinks = None
        if sinks is not None:
            delta = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1).t()
            grad_sinks = -((sinks[:, None].to(lse.dtype) - lse).exp() * delta).sum(1).to(sinks.dtype)
        of_inputs = [total.to(query.dtype) for total in totals if total is not None]
        return *of_inputs, grad_sinks, None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[KernelCall], scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention over the union of the calls' pieces, of which the first has all queries."""
    output: Any = _Attend.apply(query, key, value, sinks, calls, scale)
    return output


def _merged(output: Tensor, lse: Tensor, at: slice | Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the union of their keys. New tensors, for checkpointed activations may hold the old ones."""
    here = lse[:, at]
    total = torch.logaddexp(here, part_lse)
    mixed = (output[at] * _shares(here, total) + part * _shares(part_lse, total)).to(output.dtype)
    if isinstance(at, slice):
        return output.slice_scatter(mixed, 0, at.start, at.stop), lse.slice_scatter(total, 1, at.start, at.stop)
    return output.index_copy(0, at, mixed), lse.index_copy(1, at, total)


def _shares(lse: Tensor, total: Tensor) -> Tensor:
    """`[tokens, heads, 1]`: how much of the whole softmax lies on the keys of a part."""
    return (lse - total).exp().t()[..., None]


def _added(total: Tensor | None, like: Tensor, at: slice | Tensor, part: Tensor) -> Tensor:
    """`total` and the part: in the part's dtype where the first one had all tokens, else in float32 at least, for then
    a token may be in it many times."""
    if total is None:
        if isinstance(at, slice) and len(part) == len(like):
            return part
        total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    if isinstance(at, slice):
        total[at] += part
        return total
    return total.index_add_(0, at, part.to(total.dtype))


def shared_prefixes(offsets: IntArray, prefixes: IntArray, computed: int = 0) -> list[Piece]:
    """The pieces of full attention: one more than the longest chain of prefixes.

    `offsets` int64 `[segments + 1]`; `prefixes` int64 `[segments]`: the earlier segment that each continues, or -1. The
    first `computed` segments are keys and values alone; queries are counted from the end of these. Tokens that
    stand side by side are taken as they lie, others gathered.
    """
    lengths, first, end = np.diff(offsets), int(offsets[computed]), int(offsets[-1])
    own = lengths[computed:]
    pieces = [Piece(slice(0, end - first), slice(first, end), own, own, causal=True)]
    for ancestors in _chains(prefixes):
        continuing = np.flatnonzero(ancestors >= 0)
        asking = continuing[np.argsort(ancestors[continuing], kind="stable")]
        seen, starts = np.unique(ancestors[asking], return_index=True)
        asked = np.add.reduceat(lengths[asking], starts)
        queries, keys = _place(offsets[asking] - first, lengths[asking]), _place(offsets[seen], lengths[seen])
        pieces.append(Piece(queries, keys, asked, lengths[seen], causal=False))
    return pieces


def gathered(offsets: IntArray, prefixes: IntArray, window: int | None = None, computed: int = 0) -> list[Piece]:
    """One piece: each segment sees the last `window - 1` tokens (None: all) before it, copied, and itself.

    Arguments as those of `shared_prefixes`.
    """
    lengths, first = np.diff(offsets), int(offsets[computed])
    own = lengths[computed:]
    starts, taken = [offsets[computed:-1]], [own]
    room = np.full(len(own), int(offsets[-1]) if window is None else window - 1)
    for ancestors in _chains(prefixes):
        above = ancestors[computed:]
        count = np.where(above >= 0, np.minimum(lengths[above], room), 0)
        starts.append(offsets[above + 1] - count)
        taken.append(count)
        room = room - count
    lengths_by_level = np.stack(taken[::-1], axis=1)
    keys = _place(np.stack(starts[::-1], axis=1).ravel(), lengths_by_level.ravel())
    key_lengths = lengths_by_level.sum(1)
    reaches = window is None or int(key_lengths.max()) <= window
    queries = slice(0, int(offsets[-1]) - first)
    return [Piece(queries, keys, own, key_lengths, causal=True, window=None if reaches else window)]


def tokens_before(offsets: IntArray, prefixes: IntArray) -> IntArray:
    """int64 `[segments]`: how many tokens stand before each segment's first one."""
    lengths = np.diff(offsets)
    before = np.zeros(len(lengths), dtype=np.int64)
    for ancestors in _chains(prefixes):
        before += np.where(ancestors >= 0, lengths[ancestors], 0)
    return before


def _chains(prefixes: IntArray) -> Iterator[IntArray]:
    """Each segment's prefix, then the prefix of that, ..., -1 where there is none; ends before it is -1 for all."""
    ancestors = prefixes
    while (ancestors >= 0).any():
        yield ancestors
        ancestors = np.where(ancestors >= 0, prefixes[ancestors], -1)


def _place(starts: IntArray, lengths: IntArray) -> Place:
    """The tokens of the spans, in their order."""
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if np.array_equal(starts[1:], starts[:-1] + lengths[:-1]):
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + inside
