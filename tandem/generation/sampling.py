"""Logits -> tokens: temperature, then top-k, then top-p, by inverse-CDF sampling with counter-based random numbers.

Suffixes: `_B` rows, `_V` vocabulary, `_K` the most probable tokens of a row, in falling order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from tandem.types import BoolArray, FloatArray, IntArray

DoubleArray = np.ndarray[Any, np.dtype[np.float64]]
SeedArray = np.ndarray[Any, np.dtype[np.uint64]]

_BLOCK = 128
"""Tokens whose probabilities are added up before a large vocabulary's cumulative sum: that sum is not vectorised."""
_CANDIDATES = 1024
"""Most probable tokens that top-p looks at first; sorting a whole vocabulary costs ten times as much."""
_BELOW_ONE = 1 - 2.0**-53


@dataclass(slots=True)
class Choice:
    """How each row's next token is chosen: the fields of SamplingParams and the random stream, one entry a row."""

    seeds_B: SeedArray
    """uint64, from `stream`."""
    temperature_B: FloatArray
    top_k_B: IntArray
    """0 keeps the whole vocabulary."""
    top_p_B: DoubleArray

    def __getitem__(self, rows: slice | IntArray) -> Choice:
        return Choice(*(getattr(self, field.name)[rows] for field in fields(self)))


def stream(seeds: Sequence[int]) -> SeedArray:
    """The starting points of the random streams of `seeds`, any integers."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64))


def uniforms(seeds_B: SeedArray, position_B: IntArray) -> DoubleArray:
    """Number `position` of each row's stream: in [0, 1), 53 bits (splitmix64, Steele et al. 2014)."""
    counters = (position_B.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(seeds_B + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: SeedArray) -> SeedArray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits_BV: torch.Tensor, choice: Choice, position_B: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[B]` tokens and float32 `[B]` log softmax(logits / temperature) of them, before top-k and top-p.

    `position_B` counts the tokens that each row has had. The logits may be overwritten. A row depends on no other row.
    """
    device = logits_BV.device
    greedy_B = choice.temperature_B == 0
    logits_BV = logits_BV.float()
    if not ((choice.temperature_B == 1) | greedy_B).all():
        divisor_B = np.where(greedy_B, np.float32(1), choice.temperature_B)
        logits_BV = logits_BV.div_(torch.from_numpy(divisor_B).to(device)[:, None])
    probs_BV = logits_BV.softmax(-1)
    if greedy_B.all():
        token_B = logits_BV.argmax(-1)
    else:
        uniform_B = torch.from_numpy(uniforms(choice.seeds_B, position_B)).to(device)
        token_B = _draw(probs_BV, uniform_B)
        _redraw_filtered(token_B, probs_BV, uniform_B, choice, ~greedy_B)
        if greedy_B.any():
            rows = torch.from_numpy(np.flatnonzero(greedy_B)).to(device)
            token_B[rows] = logits_BV[rows].argmax(-1)
    return token_B, probs_BV.gather(1, token_B[:, None])[:, 0].log()


def _draw(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    vocabulary = probs_BV.shape[1]
    if vocabulary <= 4 * _BLOCK:
        return _pick(probs_BV.double(), uniform_B)[0]
    whole = vocabulary // _BLOCK
    sums = [probs_BV[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(-1)]
    if vocabulary % _BLOCK:
        sums.append(probs_BV[:, whole * _BLOCK :].sum(-1, keepdim=True))
    block_B, rest_B = _pick(torch.cat(sums, 1).double(), uniform_B)
    columns = block_B[:, None] * _BLOCK + torch.arange(_BLOCK, device=probs_BV.device)
    inside = probs_BV.gather(1, columns.clamp(max=vocabulary - 1)).double()
    if vocabulary % _BLOCK:
        inside.masked_fill_(columns >= vocabulary, 0)
    return block_B * _BLOCK + _pick(inside, rest_B)[0]


def _pick(weights: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A column of each row, with probability proportional to its weight, and what is left of the random number.

    The column's weight is positive: rounding keeps `uniform * total` below `total` as `uniform` is below 1.
    """
    cumulative = weights.cumsum(-1)
    target = uniform_B[:, None] * cumulative[:, -1:]
    # The clamp matters to rows of NaN alone, which the engine refuses.
    column = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, column)
    rest = (target - cumulative.gather(1, column) + weight) / weight
    return column[:, 0], rest[:, 0].clamp_(0, _BELOW_ONE)


def _redraw_filtered(
    token_B: torch.Tensor, probs_BV: torch.Tensor, uniform_B: torch.Tensor, choice: Choice, drawn_B: BoolArray
) -> None:
    """Replace the tokens of the rows that top-k or top-p restricts."""
    filtered = np.flatnonzero(((choice.top_k_B > 0) | (choice.top_p_B < 1)) & drawn_B)
    if len(filtered) == 0:
        return
    rows = torch.from_numpy(filtered).to(token_B.device)
    whole = len(filtered) == len(drawn_B)
    token_B[rows] = _draw_filtered(probs_BV if whole else probs_BV[rows], uniform_B[rows], choice[filtered])


def _draw_filtered(probs_BV: torch.Tensor, uniform_B: torch.Tensor, choice: Choice) -> torch.Tensor:
    vocabulary = probs_BV.shape[1]
    top_k_B = np.where(choice.top_k_B > 0, np.minimum(choice.top_k_B, vocabulary), vocabulary)
    limits = torch.from_numpy(top_k_B).to(probs_BV.device)[:, None]
    share = torch.from_numpy(choice.top_p_B).to(probs_BV.device)[:, None]
    width = min(vocabulary, int(np.where(top_k_B < vocabulary, top_k_B, _CANDIDATES).max()))
    while True:
        probs_BK, token_BK = probs_BV.topk(width)
        weights_BK = probs_BK.double()
        weights_BK.masked_fill_(torch.arange(width, device=probs_BV.device) >= limits, 0)
        before_BK = weights_BK.cumsum(-1) - weights_BK
        allowed = torch.where(limits < vocabulary, weights_BK.sum(-1, keepdim=True), 1.0)
        outside_BK = before_BK >= share * allowed
        complete_B = outside_BK[:, -1:] | (limits < vocabulary)
        if width == vocabulary or bool(complete_B.all()):
            break
        width = min(8 * width, vocabulary)
    rank_B = _pick(weights_BK.masked_fill_(outside_BK, 0), uniform_B)[0]
    return token_BK.gather(1, rank_B[:, None])[:, 0]
