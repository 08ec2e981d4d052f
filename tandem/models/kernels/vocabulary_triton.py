"""The kernels of `tandem.models.kernels.vocabulary`: a program for each token, or for a token and 8,192 columns."""

# pyright: reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 8192
_WARPS = 8
"""Of a program: from 4 to 16 it is all the same, 32 take twice as long (H200)."""


def add_tile(
    sums_5C: Tensor, numbers_CW: Tensor, place_C: Tensor, temperature: float, factor: float, cap: float | None
) -> None:
    tokens, words = numbers_CW.shape
    _add_tile[(tokens,)](
        sums_5C, numbers_CW, place_C, tokens, words, numbers_CW.stride(0), factor / temperature, cap or 1.0,
        CAPPED=cap is not None, COLUMNS=triton.next_power_of_2(words), num_warps=_WARPS,
    )  # fmt: skip


def gradient_(
    numbers_CW: Tensor,
    place_C: Tensor,
    log_total_C: Tensor,
    entropy_C: Tensor,
    by_chosen_C: Tensor,
    by_logprob_C: Tensor,
    by_entropy_C: Tensor | None,
    temperature: float,
    factor: float,
    cap: float | None,
) -> None:
    tokens, words = numbers_CW.shape
    columns = min(_COLUMNS, triton.next_power_of_2(words))
    _gradient[(tokens, triton.cdiv(words, columns))](
        numbers_CW, place_C, log_total_C, entropy_C, by_chosen_C, by_logprob_C,
        log_total_C if by_entropy_C is None else by_entropy_C,
        words, numbers_CW.stride(0), factor / temperature, cap or 1.0,
        CAPPED=cap is not None, ENTROPY=by_entropy_C is not None, COLUMNS=columns, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _add_tile(
    sums, numbers, places, tokens, words, stride, scale, cap,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < words
    x = tl.load(numbers + token * stride + column, inside, 0).to(tl.float32)
    if CAPPED:
        x = cap * _tanh(x / cap)
    z = tl.where(inside, x * scale, float("-inf"))
    largest = tl.load(sums + token)
    total = tl.load(sums + tokens + token)
    weighted = tl.load(sums + 2 * tokens + token)
    squares = tl.load(sums + 3 * tokens + token)
    maximum = tl.maximum(largest, tl.max(z, 0))
    moved = largest - maximum
    kept = tl.exp(moved)
    shifted = tl.where(inside, z - maximum, 0)
    exp = tl.where(inside, tl.exp(shifted), 0)
    tl.store(sums + token, maximum)
    tl.store(sums + tokens + token, kept * total + tl.sum(exp, 0))
    tl.store(sums + 2 * tokens + token, kept * (weighted + moved * total) + tl.sum(exp * shifted, 0))
    tl.store(sums + 3 * tokens + token, kept * kept * squares + tl.sum(exp * exp, 0))
    place = tl.load(places + token)
    if (place >= 0) & (place < words):
        tl.store(sums + 4 * tokens + token, tl.sum(tl.where(column == place, z, 0), 0))


@triton.jit
def _gradient(
    numbers, places, log_totals, entropies, by_chosen, by_logprob, by_entropy, words, stride, scale, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < words
    x = tl.load(numbers + token * stride + column, inside, 0).to(tl.float32)
    slope = scale
    if CAPPED:
        bent = _tanh(x / cap)
        x = cap * bent
        slope = scale * (1 - bent * bent)
    log_softmax = x * scale - tl.load(log_totals + token)
    by = tl.load(by_logprob + token)
    if ENTROPY:
        by += tl.load(by_entropy + token) * (log_softmax + tl.load(entropies + token))
    grad = tl.where(column == tl.load(places + token), tl.load(by_chosen + token), 0) - tl.exp(log_softmax) * by
    tl.store(numbers + token * stride + column, (grad * slope).to(numbers.dtype.element_ty), inside)


@triton.jit
def _tanh(x):
    """1 - 2 / (e^2x + 1) is exact to a rounding where it is near 1, and loses digits where x is near 0: there, the
    series."""
    small = x * (1 - x * x * (1.0 / 3 - x * x * (2.0 / 15)))
    return tl.where(tl.abs(x) < 0.1, small, 1 - 2 / (tl.exp(2 * x) + 1))
