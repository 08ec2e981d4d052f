"""Logits -> tokens: temperature, then top-k, then top-p, by inverse-CDF sampling with counter-based random numbers.

Suffixes: `_B` rows, `_V` vocabulary, `_K` the most probable tokens of a row, in falling order, `_1` one column.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

CHOICE = np.dtype([("stream", "u8"), ("made", "i8"), ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8")])
"""How a row's next token is chosen: its random stream, the tokens that it has had, and fields of SamplingParams."""

Array = np.ndarray[Any, Any]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

_BLOCK = 128
"""Tokens whose probabilities are added up before a large vocabulary's cumulative sum: that sum is not vectorised."""
_AHEAD = 8
"""Random numbers of a row that are computed at once."""


def streams(seeds: Sequence[int], used: Sequence[int] | None = None) -> Array:
    """The starting points of the random streams of `seeds`, any integers, after `used` numbers of each."""
    starts = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64))
    return starts if used is None else starts + np.array(used, dtype=np.uint64) * _GAMMA


def uniforms(stream_B: Array, made_B: Array) -> Array:
    """Number `made` of each row's stream: in [0, 1), 53 bits (splitmix64, Steele et al. 2014)."""
    counters = (made_B.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(stream_B + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits_BV: torch.Tensor, choice_B: Array, never: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a `Chooser` of these rows chooses first."""
    return Chooser(choice_B, logits_BV.device, never)(logits_BV)


class Chooser:
    """Chooses the next token of some rows, pass after pass, while the rows stay the same: what they have in common is
    looked up once, as on a CPU that takes as long as choosing."""

    def __init__(self, choice_B: Array, device: torch.device, never: torch.Tensor | None = None) -> None:
        """`choice_B` has the fields of CHOICE; `made` counts on between the calls. `never`: tokens that are not drawn,
        though the log-probs of the others stay what they are with them: those of a trainer, which knows nothing of it.
        """
        self._choice_B = choice_B
        self._device = device
        self._never = never
        greedy_B = choice_B["temperature"] == 0
        divisor_B = np.where(greedy_B, 1, choice_B["temperature"]).astype(np.float32)
        filtered_B = ((choice_B["top_k"] > 0) | (choice_B["top_p"] < 1)) & ~greedy_B
        self._divisor_B1 = self._column(divisor_B) if (divisor_B != 1).any() else None
        self._all_greedy = bool(greedy_B.all())
        self._greedy_B1 = self._column(greedy_B) if greedy_B.any() else None
        self._filtered = np.flatnonzero(filtered_B)
        self._uniforms: Iterator[torch.Tensor] = iter(())

    def __call__(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[B]` tokens and float32 `[B]` log softmax(logits / temperature) of them, before top-k and top-p.

        The logits may be overwritten. A row depends on no other row.
        """
        logits_BV = logits_BV.float()
        if self._divisor_B1 is not None:
            logits_BV = logits_BV.div_(self._divisor_B1)
        probs_BV = logits_BV.softmax(-1)
        if self._never is not None:
            probs_BV = probs_BV.index_fill_(1, self._never, 0)
            logits_BV = logits_BV.index_fill_(1, self._never, -torch.inf)
        token_B1 = logits_BV.argmax(-1, keepdim=True) if self._all_greedy else self._drawn(logits_BV, probs_BV)
        return token_B1.squeeze(1), probs_BV.gather(1, token_B1).log_().squeeze(1)

    def _drawn(self, logits_BV: torch.Tensor, probs_BV: torch.Tensor) -> torch.Tensor:
        uniform_B1 = next(self._uniforms, None)
        if uniform_B1 is None:
            self._uniforms = self._next_uniforms()
            uniform_B1 = next(self._uniforms)
        token_B1 = _draw(probs_BV, uniform_B1)
        if len(self._filtered):
            rows = torch.from_numpy(self._filtered).to(self._device)
            choice = self._choice_B[self._filtered]
            token_B1[rows] = _draw_filtered(probs_BV[rows], uniform_B1[rows], choice)
        if self._greedy_B1 is not None:
            token_B1 = torch.where(self._greedy_B1, logits_BV.argmax(-1, keepdim=True), token_B1)
        return token_B1

    def _next_uniforms(self) -> Iterator[torch.Tensor]:
        """Those of the next passes, `[B, 1]` each."""
        passes = np.arange(_AHEAD)[:, None]
        numbers = uniforms(self._choice_B["stream"], self._choice_B["made"] + passes)
        return iter(torch.from_numpy(numbers).to(self._device)[..., None].unbind())

    def _column(self, values_B: Array) -> torch.Tensor:
        return torch.from_numpy(values_B).to(self._device)[:, None]


def most_probable(logits_BV: torch.Tensor, temperature_B: Array, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[B, count]` tokens, the most probable first, and float32 `[B, count]` log softmax(logits / temperature).

    The temperature of greedy rows, 0, stands for 1, as in `sample`.
    """
    divisor_B = np.where(temperature_B == 0, 1, temperature_B).astype(np.float32)
    scaled_BV = logits_BV.float() / torch.from_numpy(divisor_B).to(logits_BV.device)[:, None]
    logprob_BK, token_BK = scaled_BV.log_softmax(-1).topk(min(count, logits_BV.shape[1]))
    return token_BK, logprob_BK


def _draw(probs_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`."""
    vocabulary = probs_BV.shape[1]
    if vocabulary <= 4 * _BLOCK:
        return _pick(probs_BV, uniform_B1)
    if vocabulary % _BLOCK:
        probs_BV = pad(probs_BV, (0, -vocabulary % _BLOCK))
    blocks = probs_BV.unflatten(1, (-1, _BLOCK))
    block_B1, rest_B1 = _pick_with_rest(blocks.sum(-1), uniform_B1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block_B1[:, 0]]
    return block_B1 * _BLOCK + _pick(inside, rest_B1)


def _draw_filtered(probs_BV: torch.Tensor, uniform_B1: torch.Tensor, choice_B: Array) -> torch.Tensor:
    """`[B, 1]`."""
    vocabulary, device = probs_BV.shape[1], probs_BV.device
    top_k_B = np.where(choice_B["top_k"] > 0, np.minimum(choice_B["top_k"], vocabulary), vocabulary)
    probs_BK, token_BK = probs_BV.topk(int(top_k_B.max()))
    beyond_BK = torch.arange(probs_BK.shape[1], device=device) >= torch.from_numpy(top_k_B).to(device)[:, None]
    weights_BK = probs_BK.double().masked_fill_(beyond_BK, 0)
    cumulative_BK = weights_BK.cumsum(-1)
    share_BK = torch.from_numpy(choice_B["top_p"].copy()).to(device)[:, None] * cumulative_BK[:, -1:]
    rank_B1 = _pick(weights_BK.masked_fill(cumulative_BK - weights_BK >= share_BK, 0), uniform_B1)
    return token_BK.gather(1, rank_B1)


def _pick(weights: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """A column of each row, `[B, 1]`, with probability proportional to its weight.

    The column's weight is positive: rounding keeps `uniform * total` below `total` as `uniform` is below 1.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return _column(cumulative, uniform_B1 * cumulative.narrow(1, -1, 1))


def _pick_with_rest(weights: torch.Tensor, uniform_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_pick` returns, and what is left of the random number."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform_B1 * cumulative[:, -1:]
    column = _column(cumulative, target)
    weight = weights.gather(1, column).double()
    rest = (target - cumulative.gather(1, column) + weight) / weight
    return column, rest.clamp_(0, 1 - 2.0**-53)


def _column(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # The clamp matters to rows of NaN alone, which the engine refuses.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
