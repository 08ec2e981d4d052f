"""A micro-batch as Megatron-Core takes it: whole rows head to tail, and of them what this rank holds.

Megatron-Core knows no shared prefixes: each row gets its prompt back. With context parallelism every row is padded and
cut into 2 * ranks chunks, of which rank r holds the r-th from either end, so that all have as much to attend to.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from tandem.models.attention import PackedRows
from tandem.models.attention.pieces import tokens_before
from tandem.types import BoolArray, IntArray, MicroBatch


@dataclass
class PackedSeqPlan(PackedSeqParams):
    """The rows of a pass, for TransformerEngine's attention and for the local one."""

    rows: PackedRows | None = None
    """The rows of all context-parallel ranks together."""
    held: Tensor | None = None
    """Which of their tokens this rank holds."""
    gathered: Tensor | None = None
    """Where each of their tokens is when the ranks' own are put one after another."""
    padding: Any = None
    """bool `[tokens of this rank]`: those that stand for nothing."""
    experts: Tensor | None = None
    """int64 `[tokens of this rank, layers, top_k]`: what the routers must choose; None: what they like."""
    coefficients: tuple[float, float] = (0.0, 0.0)
    """Coefficients of the routers' losses over the tokens of the pass: for balance, and for small logits."""


@dataclass(slots=True)
class RankRows:
    """What one rank computes on in one pass."""

    token_ids: Tensor
    """int64 `[1, tokens of this rank]`."""
    plan: PackedSeqPlan
    predicted_at: Tensor
    """Which of the rank's tokens predict the targets that it scores."""
    order: Tensor
    """Which of the micro-batch's targets these are."""
    targets: Tensor
    """int64 `[S]`: all of the micro-batch."""


def lay_out(micro_batch: MicroBatch | None, group: ProcessGroup, multiple: int, device: torch.device) -> RankRows:
    """The rows of a pass on this rank of `group`, the context-parallel one. None: one row of padding.

    `multiple`: what a rank's number of tokens must be divisible by.
    """
    ranks, rank = group.size(), group.rank()
    chunks = 2 * ranks if ranks > 1 else 1
    whole = _whole_rows_or_none(micro_batch)
    lengths, padded_lengths = _pad_rows(whole.lengths, chunks, multiple)
    offsets = np.concatenate(([0], padded_lengths.cumsum()))
    size = int(offsets[-1])
    place_of_token = np.concatenate([offsets[row] + np.arange(length) for row, length in enumerate(lengths)])

    token_ids = np.zeros(size, np.int64)
    token_ids[place_of_token] = whole.token_ids
    is_padding = np.ones(size, np.bool_)
    is_padding[place_of_token] = False

    held_by_rank = [_held(offsets, chunks, one) for one in range(ranks)]
    held = held_by_rank[rank]
    place_here = np.full(size, -1)
    place_here[held] = np.arange(len(held))
    predicted_here = place_here[place_of_token[whole.predicted_at]]
    order = np.flatnonzero(predicted_here >= 0)

    def tensor(array: IntArray | BoolArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    plan = _plan(offsets, held, np.argsort(np.concatenate(held_by_rank)), device)
    plan.padding = tensor(is_padding[held])
    if whole.experts is not None:
        _, layers, top_k = whole.experts.shape
        experts = np.tile(np.arange(top_k), (size, layers, 1))  # padding takes any
        experts[place_of_token] = whole.experts
        plan.experts = tensor(experts[held])
    return RankRows(
        token_ids=tensor(token_ids[held])[None],
        plan=plan,
        predicted_at=tensor(predicted_here[order]),
        order=tensor(order),
        targets=tensor(whole.targets),
    )


@dataclass(slots=True)
class WholeRows:
    """A micro-batch as rows that each begin with their prompt, head to tail."""

    lengths: IntArray
    token_ids: IntArray
    predicted_at: IntArray
    """`[S]`: places among `token_ids` whose hidden states predict the targets."""
    targets: IntArray
    """int64 `[S]`."""
    experts: IntArray | None
    """`[tokens, layers, top_k]`."""


def _whole_rows_or_none(micro_batch: MicroBatch | None) -> WholeRows:
    nothing = np.zeros(0, np.int64)
    if micro_batch is None:
        return WholeRows(nothing, nothing, nothing, nothing, None)
    lengths, tokens, predicted = whole_rows(micro_batch)
    experts = None if micro_batch.experts is None else micro_batch.experts[tokens]
    return WholeRows(lengths, micro_batch.token_ids[tokens], predicted, micro_batch.targets.astype(np.int64), experts)


def _pad_rows(lengths: IntArray, chunks: int, multiple: int) -> tuple[IntArray, IntArray]:
    """Lengths without and with padding, so that every row divides into `chunks` and the sum into `chunks * multiple`.

    What is missing to the sum is a row of padding alone at the end.
    """
    padded_lengths = -(-lengths // chunks) * chunks
    missing = -int(padded_lengths.sum()) % (chunks * multiple)
    if missing == 0 and len(lengths) == 0:
        missing = chunks * multiple
    if missing:
        return np.append(lengths, 0), np.append(padded_lengths, missing)
    return lengths, padded_lengths


def whole_rows(micro_batch: MicroBatch) -> tuple[IntArray, IntArray, IntArray]:
    """Lengths of rows that each begin with their prefix, which tokens they are, and the places among these of those
    that are predicted."""
    offsets, prefixes = micro_batch.offsets, micro_batch.prefixes
    lengths, before = np.diff(offsets), tokens_before(offsets, prefixes)
    ends = np.setdiff1d(np.arange(len(lengths)), prefixes)  # segments that nothing continues: one a row
    chains = [_chain(int(end), prefixes) for end in ends]
    row_lengths = (before + lengths)[ends]
    starts = row_lengths.cumsum() - row_lengths
    begins = np.zeros(len(lengths), np.int64)
    for chain, start in zip(chains[::-1], starts[::-1], strict=True):  # a prefix is predicted in its first row
        begins[chain] = start + before[chain]
    parts = [np.arange(int(offsets[segment]), int(offsets[segment + 1])) for chain in chains for segment in chain]
    home = np.searchsorted(offsets, micro_batch.predicted_at, side="right") - 1
    return row_lengths, np.concatenate(parts), begins[home] + micro_batch.predicted_at - offsets[home]


def _chain(end: int, prefixes: IntArray) -> list[int]:
    """A segment and all that it continues, from the first one on."""
    chain = [end]
    while prefixes[chain[-1]] >= 0:
        chain.append(int(prefixes[chain[-1]]))
    return chain[::-1]


def _held(offsets: IntArray, chunks: int, rank: int) -> IntArray:
    """The tokens of one context-parallel rank, in their order."""
    if chunks == 1:
        return np.arange(offsets[-1])
    cuts = [np.arange(start, stop).reshape(chunks, -1) for start, stop in pairwise(offsets)]
    return np.concatenate([cut[[rank, chunks - 1 - rank]].ravel() for cut in cuts])


def _plan(offsets: IntArray, held: IntArray, gathered: IntArray, device: torch.device) -> PackedSeqPlan:
    cumulated = torch.from_numpy(offsets.astype(np.int32)).to(device)
    longest = int(np.diff(offsets).max())
    return PackedSeqPlan(
        qkv_format="thd",
        cu_seqlens_q=cumulated,
        cu_seqlens_kv=cumulated,
        cu_seqlens_q_padded=cumulated,
        cu_seqlens_kv_padded=cumulated,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        rows=PackedRows(offsets, device),
        held=torch.from_numpy(held).to(device),
        gathered=torch.from_numpy(gathered).to(device),
    )
