"""The kernels of `tandem.models.kernels.decoding`.

Sizes of blocks are those of the best of 12 to 72 tried on an H200.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _TILE_BYTES = 64, 2**16
"""Tokens that a program of attention reads at once, and the most bytes of their keys and values: both are in the shared
memory of a multiprocessor, of which some GPUs have 100 KB."""
_PROGRAMS = 512
"""Fewer rows times key heads are split: four programs for each of a large GPU's multiprocessors hide the memory."""
_MOST_SPLITS = 32
_LOG2_E = 1.4426950408889634


def add_and_norm_(hidden_N: Tensor, added_N: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    rows, width = hidden_N.shape
    normed_N = torch.empty_like(hidden_N)
    _add_and_norm[(rows,)](
        hidden_N, hidden_N if added_N is None else added_N, weight, normed_N, epsilon, width,
        ADDS=added_N is not None, COLUMNS=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return normed_N


def gated(gate_up_N: Tensor) -> Tensor:
    rows, width = len(gate_up_N), gate_up_N.shape[1] // 2
    result_N = gate_up_N.new_empty(rows, width)
    _gated[(rows, triton.cdiv(width, 1024))](gate_up_N, result_N, width, COLUMNS=1024, num_warps=4)
    return result_N


def places(table_N: Tensor, position_N: Tensor, page: int) -> Tensor:
    rows = len(position_N)
    place_N = torch.empty_like(position_N, memory_format=torch.contiguous_format)
    _places[(triton.cdiv(rows, 128),)](
        table_N, position_N, place_N, rows, table_N.stride(0), PAGE=page, COLUMNS=128, num_warps=4
    )
    return place_N


def rotate_and_store_(
    packed_N: Tensor,
    cosines_N: Tensor,
    sines_N: Tensor,
    place_N: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
) -> None:
    rows, heads, head_dim = packed_N.shape
    kv_heads = keys.shape[2]
    _rotate_and_store[(rows, heads)](
        packed_N, cosines_N, sines_N, place_N, keys, values,
        packed_N if query_norm is None else query_norm, packed_N if key_norm is None else key_norm, epsilon,
        HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        COLUMNS=triton.next_power_of_2(head_dim // 2), NORMS=query_norm is not None, num_warps=1,
    )  # fmt: skip


def attend_pages(
    query_N: Tensor,
    keys: Tensor,
    values: Tensor,
    table_N: Tensor,
    position_N: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, _ = query_N.shape
    page, kv_heads = keys.shape[1:3]
    output_N = query_N.new_empty(rows, heads, values.shape[-1])
    splits = _splits(rows * kv_heads)
    whole = splits == 1
    columns = [max(16, triton.next_power_of_2(x.shape[-1])) for x in (keys, values)]
    tile = max(16, min(_TILE, _TILE_BYTES // (sum(columns) * keys.element_size())))
    part = output_N if whole else output_N.new_empty(rows, heads, splits, values.shape[-1], dtype=torch.float32)
    log_sum = output_N if whole else output_N.new_empty(rows, heads, splits, dtype=torch.float32)
    _attend_pages[(rows, kv_heads, splits)](
        query_N, keys, values, table_N, position_N, sinks if sinks is not None else query_N, part, log_sum,
        scale * _LOG2_E if cap is None else scale, cap or 1.0, window or 0,
        query_N.stride(0), query_N.stride(1), table_N.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, KEY_DIM=query_N.shape[-1], VALUE_DIM=values.shape[-1], PAGE=page,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEY_COLUMNS=columns[0], VALUE_COLUMNS=columns[1],
        TILE=tile, SPLITS=splits, WINDOWED=window is not None, CAPPED=cap is not None, SINKS=sinks is not None,
        EXACT=query_N.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    if not whole:
        _combine[(rows * heads,)](
            part, log_sum, output_N, VALUE_DIM=values.shape[-1],
            VALUE_COLUMNS=triton.next_power_of_2(values.shape[-1]), SPLITS=splits, num_warps=2 if splits < 16 else 4,
        )  # fmt: skip
    return output_N


def _splits(programs: int) -> int:
    """A power of two: how many programs share the tokens of a row and key head."""
    wanted = max(1, min(_MOST_SPLITS, _PROGRAMS // programs))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def _add_and_norm(
    hidden, added, weight, normed, epsilon, width,
    ADDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, COLUMNS)
    inside = column < width
    x = tl.load(hidden + row + column, inside, 0).to(tl.float32)
    if ADDS:
        rounded = (x + tl.load(added + row + column, inside, 0).to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + row + column, rounded, inside)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    x = x * tl.load(weight + column, inside, 0).to(tl.float32)
    tl.store(normed + row + column, x.to(normed.dtype.element_ty), inside)


@triton.jit
def _gated(gate_up, result, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, 0).to(tl.float32)
    tl.store(result + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(result.dtype.element_ty), inside)


@triton.jit
def _places(table, positions, places, rows, table_stride, PAGE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + row, row < rows, 0)
    page = tl.load(table + row.to(tl.int64) * table_stride + position // PAGE, row < rows, 0).to(tl.int64)
    tl.store(places + row, page * PAGE + position % PAGE, row < rows)


@triton.jit
def _rotate_and_store(
    packed, cosines, sines, places, keys, values, query_norm, key_norm, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """A program for each token and head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    start = packed + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    dtype = packed.dtype.element_ty
    low = tl.load(start + column, inside, 0).to(tl.float32)
    high = tl.load(start + HALF + column, inside, 0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + epsilon)
            norm = query_norm if head < HEADS else key_norm
            low = (low * factor * tl.load(norm + column, inside, 0).to(tl.float32)).to(dtype).to(tl.float32)
            high = (high * factor * tl.load(norm + HALF + column, inside, 0).to(tl.float32)).to(dtype).to(tl.float32)
        cos = tl.load(cosines + row * HALF + column, inside, 0).to(tl.float32)
        sin = tl.load(sines + row * HALF + column, inside, 0).to(tl.float32)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if head < HEADS:
        goal = start
    else:
        place = tl.load(places + row) * KV_HEADS
        if head < HEADS + KV_HEADS:
            goal = keys + (place + head - HEADS) * 2 * HALF
        else:
            goal = values + (place + head - HEADS - KV_HEADS) * 2 * HALF
    tl.store(goal + column, low.to(dtype), inside)
    tl.store(goal + HALF + column, high.to(dtype), inside)


@triton.jit
def _attend_pages(
    queries, keys, values, table, positions, sinks, part, log_sums, scale, cap, window,
    query_stride, head_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program for each row, key head and split of its tokens; logarithms and powers are of 2. Dao et al. 2023,
    "Flash-Decoding"."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    start = 0
    if WINDOWED:
        start = tl.maximum(length - window, 0)
    first_tile = start // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    share = tl.cdiv(tiles, SPLITS)
    first = first_tile + split * share
    last = tl.minimum(first + share, first_tile + tiles)
    member = tl.arange(0, GROUP)
    head = kv_head * (HEADS // KV_HEADS) + member
    is_head = member < HEADS // KV_HEADS
    key_column = tl.arange(0, KEY_COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    of_query = row * query_stride + head[:, None] * head_stride + key_column[None, :]
    query = tl.load(queries + of_query, is_head[:, None] & (key_column < KEY_DIM)[None, :], 0)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if SINKS:
        if split == 0:
            largest = tl.load(sinks + head, is_head, 0).to(tl.float32) * 1.4426950408889634
            total += 1
    output = tl.zeros([GROUP, VALUE_COLUMNS], tl.float32)
    step = tl.arange(0, TILE)
    for tile in range(first, last):
        at = tile * TILE + step
        seen = (at < length) & (at >= start)
        page = tl.load(table + row * table_stride + at // PAGE, at < length, 0).to(tl.int64)
        place = (page * PAGE + at % PAGE) * KV_HEADS + kv_head
        key_places = keys + place[None, :] * KEY_DIM + key_column[:, None]
        key = tl.load(key_places, seen[None, :] & (key_column < KEY_DIM)[:, None], 0)
        if EXACT:
            scores = tl.dot(query, key, input_precision="ieee") * scale
        else:
            scores = tl.dot(query, key) * scale
        if CAPPED:
            scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1)) * 1.4426950408889634
        scores = tl.where(seen[None, :], scores, float("-inf"))
        maximum = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - maximum[:, None])
        kept = tl.exp2(largest - maximum)
        total = total * kept + tl.sum(weights, 1)
        value_places = values + place[:, None] * VALUE_DIM + value_column[None, :]
        value = tl.load(value_places, seen[:, None] & (value_column < VALUE_DIM)[None, :], 0)
        if EXACT:
            output = output * kept[:, None] + tl.dot(weights, value, input_precision="ieee")
        else:
            output = output * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = maximum
    stored = is_head[:, None] & (value_column < VALUE_DIM)[None, :]
    if SPLITS == 1:
        place = (row * HEADS + head[:, None]) * VALUE_DIM + value_column[None, :]
        tl.store(part + place, (output / total[:, None]).to(part.dtype.element_ty), stored)
    else:
        of_split = (row * HEADS + head) * SPLITS + split
        some = total > 0
        log_sum = tl.where(some, largest + tl.log2(tl.where(some, total, 1)), float("-inf"))
        tl.store(log_sums + of_split, log_sum, is_head)
        place = of_split[:, None] * VALUE_DIM + value_column[None, :]
        tl.store(part + place, output / tl.where(some, total, 1)[:, None], stored)


@triton.jit
def _combine(
    part, log_sums, outputs,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program for each row and head."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, VALUE_COLUMNS)
    inside = column < VALUE_DIM
    log_sum = tl.load(log_sums + head * SPLITS + split)
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    place = (head * SPLITS + split[:, None]) * VALUE_DIM + column[None, :]
    output = tl.sum(tl.load(part + place, inside[None, :], 0) * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(outputs + head * VALUE_DIM + column, output.to(outputs.dtype.element_ty), inside)
