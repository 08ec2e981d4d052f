"""The kernels of `tandem.models.kernels.drawing`: no row is sorted.

Two kernels make probabilities of logits, tile by tile. A third lists the tokens of a row that top-k and top-p may
leave, which of a peaked distribution are few. The last one finds, by bisection over the bits of probabilities, which of
these are left and which one is drawn: as numbers above 0 their bits are in the order of the numbers.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models.kernels.drawing import FIELDS

_TILE = 4096
"""Columns of a tile of the vocabulary."""
_WARPS = 8
_BLOCK_COLUMNS = 128
"""Columns of which the largest probability is known: the k-th largest of these has at least k tokens from it on."""
_BLOCK = tl.constexpr(_BLOCK_COLUMNS)
_POSITION, _MADE, _STREAM, _TEMPERATURE, _TOP_K, _TOP_P = (
    tl.constexpr(FIELDS.index(name)) for name in ("position", "made", "stream", "temperature", "top_k", "top_p")
)
_TOKEN = tl.constexpr(FIELDS.index("token"))
_BITS_OF_ONE = tl.constexpr(0x3F800000)
_MARGIN = tl.constexpr(1 - 2.0**-20)


class Probabilities(NamedTuple):
    """Of logits `[B, V]`, and what is known of them tile by tile."""

    sums: Tensor
    """Float32 `[B, tiles, 3]`: the largest logit, the sum of exp of how far all are from it, and the largest logit of a
    token that may be drawn."""
    best: Tensor
    """Int32 `[B, tiles]`: that token."""
    probs_BV: Tensor
    """Float32: softmax, 0 for tokens that are never drawn."""
    masses: Tensor
    """Float64 `[B, tiles]`: the sums of these."""
    peaks: Tensor
    """Float32 `[B, blocks]`: the largest one of each block."""


def choose_(logits_BV: Tensor, state_8B: Tensor, chosen_B2: Tensor, never: Tensor | None) -> None:
    draw_(probabilities(logits_BV, state_8B, never), state_8B, chosen_B2)


def probabilities(logits_BV: Tensor, state_8B: Tensor, never: Tensor | None) -> Probabilities:
    rows, words = logits_BV.shape
    tiles, float32 = -(-words // _TILE), torch.float32
    made = Probabilities(
        logits_BV.new_empty(rows, tiles, 3, dtype=float32),
        logits_BV.new_empty(rows, tiles, dtype=torch.int32),
        logits_BV.new_empty(rows, words, dtype=float32),
        logits_BV.new_empty(rows, tiles, dtype=torch.float64),
        logits_BV.new_empty(rows, tiles * _TILE // _BLOCK_COLUMNS, dtype=float32),
    )
    barred = made.best
    if never is not None:
        barred = torch.zeros(words, dtype=torch.int8, device=logits_BV.device).index_fill_(0, never, 1)
    where = words, logits_BV.stride(0), state_8B.stride(0), barred, tiles
    _sums[(rows, tiles)](
        logits_BV, state_8B, made.sums, made.best, *where, TILE=_TILE, BARRED=never is not None, num_warps=_WARPS
    )
    _probabilities[(rows, tiles)](
        logits_BV, state_8B, made.sums, made.probs_BV, made.masses, made.peaks, *where,
        TILE=_TILE, TILES=triton.next_power_of_2(tiles), BARRED=never is not None, num_warps=_WARPS,
    )  # fmt: skip
    return made


def draw_(of: Probabilities, state_8B: Tensor, chosen_B2: Tensor) -> None:
    rows, words = of.probs_BV.shape
    listed_BV = of.probs_BV.new_empty(rows, words, dtype=torch.int32)
    counts_B = of.probs_BV.new_empty(rows, dtype=torch.int32)
    (tiles, blocks), stride = (x.shape[1] for x in (of.masses, of.peaks)), state_8B.stride(0)
    sizes = {"TILE": _TILE, "TILES": triton.next_power_of_2(tiles)}
    _list[(rows,)](
        state_8B, of.probs_BV, of.masses, of.peaks, listed_BV, counts_B, words, stride, blocks, tiles,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=_WARPS, **sizes,
    )  # fmt: skip
    _choose[(rows,)](
        state_8B, of.probs_BV, of.sums, of.best, of.masses, listed_BV, counts_B, chosen_B2, words, stride, tiles,
        num_warps=_WARPS, **sizes,
    )  # fmt: skip


@triton.jit
def _scaled(logits, state, row, column, words, logits_stride, state_stride):
    """Logits by the row's temperature, float32."""
    temperature = tl.load(state + _TEMPERATURE * state_stride + row).to(tl.float64, bitcast=True).to(tl.float32)
    x = tl.load(logits + row * logits_stride + column, column < words, float("-inf")).to(tl.float32)
    return x / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _sums(
    logits, state, sums, best, words, logits_stride, state_stride, barred, tiles,
    TILE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """A program for each row and tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    x = _scaled(logits, state, row, column, words, logits_stride, state_stride)
    largest = tl.max(x, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    place = sums + (row * tiles + tile) * 3
    tl.store(place, largest)
    tl.store(place + 1, tl.sum(tl.exp(x - shift), 0))
    if BARRED:
        x = tl.where(tl.load(barred + column, column < words, 1) != 0, float("-inf"), x)
    largest = tl.max(x, 0)
    tl.store(place + 2, largest)
    tl.store(best + row * tiles + tile, tl.min(tl.where(x == largest, column, words - 1), 0))


@triton.jit
def _probabilities(
    logits, state, sums, probs, masses, peaks, words, logits_stride, state_stride, barred, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """A program for each row and tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    every = tl.arange(0, TILES)
    place = sums + (row * tiles + every) * 3
    of_tiles = tl.load(place, every < tiles, float("-inf"))
    largest = tl.max(of_tiles, 0)
    total = tl.sum(tl.load(place + 1, every < tiles, 0) * tl.exp(of_tiles - largest), 0)
    p = tl.exp(_scaled(logits, state, row, column, words, logits_stride, state_stride) - largest) / total
    if BARRED:
        p = tl.where(tl.load(barred + column, column < words, 1) != 0, 0.0, p)
    tl.store(probs + row * words + column, p, column < words)
    tl.store(masses + row * tiles + tile, tl.sum(p.to(tl.float64), 0))
    block = tile * (TILE // _BLOCK) + tl.arange(0, TILE // _BLOCK)
    peak = tl.max(tl.reshape(p, [TILE // _BLOCK, _BLOCK]), 1)
    tl.store(peaks + row * tiles * (TILE // _BLOCK) + block, peak)


@triton.jit
def _top_k_and_p(state, row, words, state_stride):
    """0 and 1.0 for a greedy row."""
    temperature = tl.load(state + _TEMPERATURE * state_stride + row).to(tl.float64, bitcast=True)
    top_k = tl.load(state + _TOP_K * state_stride + row)
    top_p = tl.load(state + _TOP_P * state_stride + row).to(tl.float64, bitcast=True)
    return tl.where(temperature == 0, 0, tl.minimum(top_k, words)), tl.where(temperature == 0, 1.0, top_p)


@triton.jit
def _list(
    state, probs, masses, peaks, listed, counts, words, state_stride, blocks, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program for each row: the tokens that top-k and top-p may leave, by their ids."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = _top_k_and_p(state, row, words, state_stride)
    if (top_k > 0) | (top_p < 1):
        every = tl.arange(0, TILES)
        total = tl.sum(tl.load(masses + row * tiles + every, every < tiles, 0), 0)
        lowest = ((1 - top_p) * total * (_MARGIN / words)).to(tl.float32)
        if top_k > 0:
            block = tl.arange(0, BLOCKS)
            peak = tl.load(peaks + row * blocks + block, block < blocks, 0).to(tl.int32, bitcast=True)
            low = tl.program_id(0) * 0
            high = low + _BITS_OF_ONE
            while low < high:  # the smallest bits that fewer than k peaks exceed
                middle = (low + high) // 2
                fewer = tl.sum((peak > middle).to(tl.int32), 0) < top_k
                high = tl.where(fewer, middle, high)
                low = tl.where(fewer, low, middle + 1)
            lowest = low.to(tl.float32, bitcast=True)
        count = tl.program_id(0) * 0
        for first in range(0, words, TILE):
            column = first + tl.arange(0, TILE)
            p = tl.load(probs + row * words + column, column < words, 0)
            kept = ((p >= lowest) & (p > 0)).to(tl.int32)
            place = count + tl.cumsum(kept, 0) - 1
            tl.store(listed + row * words + place, column, kept > 0)
            count += tl.sum(kept, 0)
        tl.store(counts + row, count)


@triton.jit
def _above(probs, listed, count, bits, TILE: tl.constexpr):
    """How many of the listed tokens have a probability of larger bits, and the sum of these, float64."""
    mass = tl.zeros([TILE], tl.float64)
    number = tl.zeros([TILE], tl.int32)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        p = tl.load(probs + tl.load(listed + place, place < count, 0), place < count, 0)
        larger = p.to(tl.int32, bitcast=True) > bits
        mass += tl.where(larger, p, 0.0).to(tl.float64)
        number += larger.to(tl.int32)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _equal(probs, listed, count, bits, TILE: tl.constexpr):
    """How many of the listed tokens have a probability of these bits."""
    number = tl.zeros([TILE], tl.int32)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        p = tl.load(probs + tl.load(listed + place, place < count, 0), place < count, 0)
        number += ((p.to(tl.int32, bitcast=True) == bits) & (place < count)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def _last_of_first(probs, listed, count, top_k, TILE: tl.constexpr):
    """The bits of the k-th largest of the listed probabilities, or 0: the smallest that fewer than k exceed."""
    low = count * 0
    high = low + _BITS_OF_ONE
    while low < high:
        middle = (low + high) // 2
        number, _ = _above(probs, listed, count, middle, TILE)
        fewer = number < top_k
        high = tl.where(fewer, middle, high)
        low = tl.where(fewer, low, middle + 1)
    return low


@triton.jit
def _where_mass_passes(probs, listed, count, bits, mass, OR_IS: tl.constexpr, TILE: tl.constexpr):
    """The smallest bits from `bits` on above which the listed probabilities have less than `mass`; `OR_IS`: or as
    much."""
    low = bits
    high = tl.maximum(bits, _BITS_OF_ONE)
    while low < high:
        middle = (low + high) // 2
        _, above = _above(probs, listed, count, middle, TILE)
        enough = above <= mass if OR_IS else above < mass
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _draw_listed(probs, listed, count, top_k, top_p, total, uniform, words, TILE: tl.constexpr):
    """A token of those that top-k and top-p leave, in falling order, of equal ones by their ids."""
    lowest = count * 0
    spare = count  # how many of those at the lowest bits may be drawn
    if top_k > 0:
        lowest = _last_of_first(probs, listed, count, top_k, TILE)
        number, total = _above(probs, listed, count, lowest, TILE)
        spare = tl.minimum((top_k - number).to(tl.int32), _equal(probs, listed, count, lowest, TILE))
        total += spare * lowest.to(tl.float32, bitcast=True).to(tl.float64)
    # Top-p: of those at `last` as many may be drawn as begin before its share.
    share = top_p * total
    last = _where_mass_passes(probs, listed, count, lowest, share, False, TILE)
    _, above = _above(probs, listed, count, last, TILE)
    each = last.to(tl.float32, bitcast=True).to(tl.float64)
    spare = tl.where(last == lowest, spare, _equal(probs, listed, count, last, TILE))
    begin = tl.ceil((share - above) / tl.where(each > 0, each, 1.0))
    begin = tl.where(above + (begin - 1) * each >= share, begin - 1, begin)
    begin = tl.where(above + begin * each < share, begin + 1, begin)
    allowed = tl.where(each > 0, tl.minimum(tl.maximum(begin, 0.0), spare.to(tl.float64)), 0.0)
    # The one at which the cumulative sum passes the random number's share of all that is left.
    target = uniform * (above + allowed * each)
    bits = _where_mass_passes(probs, listed, count, last, target, True, TILE)
    _, above = _above(probs, listed, count, bits, TILE)
    each = bits.to(tl.float32, bitcast=True).to(tl.float64)
    there = tl.where(bits == last, allowed, _equal(probs, listed, count, bits, TILE).to(tl.float64))
    place = tl.floor((target - above) / tl.where(each > 0, each, 1.0))
    place = tl.where(above + place * each > target, place - 1, place)
    place = tl.where(above + (place + 1) * each <= target, place + 1, place)
    wanted = tl.maximum(tl.minimum(place, there - 1), 0.0).to(tl.int32) + 1
    token = count * 0
    seen = count * 0
    for first in range(0, count, TILE):
        column = first + tl.arange(0, TILE)
        id_of = tl.load(listed + column, column < count, 0)
        p = tl.load(probs + id_of, column < count, 0)
        same = ((p.to(tl.int32, bitcast=True) == bits) & (column < count)).to(tl.int32)
        number = seen + tl.cumsum(same, 0)
        token += tl.sum(tl.where((same > 0) & (number == wanted), id_of, 0), 0)
        seen += tl.sum(same, 0)
    return token


@triton.jit
def _draw_any(probs, masses, uniform, words, tiles, TILE: tl.constexpr, TILES: tl.constexpr):
    """A token of all, by their ids: first its tile."""
    every = tl.arange(0, TILES)
    mass = tl.load(masses + every, every < tiles, 0)
    cumulative = tl.cumsum(mass, 0)
    target = uniform * tl.max(cumulative, 0)
    tile = tl.sum((cumulative <= target).to(tl.int32), 0)
    tile = tl.minimum(tile, tl.max(tl.where(mass > 0, every, 0), 0))
    before = tl.sum(tl.where(every == tile, cumulative - mass, 0.0), 0)
    column = tl.arange(0, TILE)
    p = tl.load(probs + tile * TILE + column, tile * TILE + column < words, 0)
    inside = tl.sum((before + tl.cumsum(p.to(tl.float64), 0) <= target).to(tl.int32), 0)
    inside = tl.minimum(inside, tl.max(tl.where(p > 0, column, 0), 0))
    return tile * TILE + inside


@triton.jit
def _mixed(z):
    """Steele et al. 2014, splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _choose(
    state, probs, sums, best, masses, listed, counts, chosen, words, state_stride, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program for each row: its next token and log-prob, and the row's state one token on."""
    row = tl.program_id(0).to(tl.int64)
    probs += row * words
    made = tl.load(state + _MADE * state_stride + row)
    stream = tl.load(state + _STREAM * state_stride + row).to(tl.uint64, bitcast=True)
    counter = (made + 1).to(tl.uint64, bitcast=True)
    mixed = _mixed(stream + counter * 0x9E3779B97F4A7C15)
    uniform = (mixed >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (2.0**-53)
    temperature = tl.load(state + _TEMPERATURE * state_stride + row).to(tl.float64, bitcast=True)
    top_k, top_p = _top_k_and_p(state, row, words, state_stride)
    every = tl.arange(0, TILES)
    if temperature == 0:
        of_tiles = tl.load(sums + (row * tiles + every) * 3 + 2, every < tiles, float("-inf"))
        tokens = tl.load(best + row * tiles + every, every < tiles, 0)
        token = tl.min(tl.where(of_tiles == tl.max(of_tiles, 0), tokens, words - 1), 0)
    elif (top_k > 0) | (top_p < 1):
        total = tl.sum(tl.load(masses + row * tiles + every, every < tiles, 0), 0)
        count = tl.load(counts + row)
        token = _draw_listed(probs, listed + row * words, count, top_k, top_p, total, uniform, words, TILE)
    else:
        token = _draw_any(probs, masses + row * tiles, uniform, words, tiles, TILE, TILES)
    token = tl.maximum(tl.minimum(token, words - 1), 0)
    tl.debug_barrier()  # whoever is late still reads how many tokens there were
    tl.store(chosen + row * 2, token.to(tl.float64))
    tl.store(chosen + row * 2 + 1, tl.log(tl.load(probs + token)).to(tl.float64))
    goes_on = (made >= 0).to(tl.int64)
    position = state + _POSITION * state_stride + row
    tl.store(state + _TOKEN * state_stride + row, token.to(tl.int64))
    tl.store(position, tl.load(position) + goes_on)
    tl.store(state + _MADE * state_stride + row, made + goes_on)
