"""Logits -> tokens, by counter-based random numbers.

Suffixes: `_B` rows, `_V` vocabulary, `_K` the most probable tokens of a row, in falling order, `_1` one column.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tandem.models.kernels.drawing import TokenChoice

CHOICE = np.dtype([("stream", "u8"), ("made", "i8"), ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8")])
"""How a row's next token is chosen: its random stream, the tokens that it has had, and fields of SamplingParams."""

Array = np.ndarray[Any, Any]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

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
    """Chooses the next token of some rows, pass after pass, while the rows stay the same."""

    def __init__(self, choice_B: Array, device: torch.device, never: torch.Tensor | None = None) -> None:
        """`choice_B` has the fields of CHOICE; `made` counts on between the calls. `never`: tokens that are not drawn,
        though the log-probs of the others stay what they are with them: those of a trainer, which knows nothing of it.
        """
        self._choice_B = choice_B
        self._device = device
        self._never = never
        fields = (torch.from_numpy(choice_B[name].copy()).to(device) for name in ("temperature", "top_k", "top_p"))
        self._choice = TokenChoice.of(*fields)
        self._uniforms: Iterator[torch.Tensor] = iter(())

    def __call__(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[B]` tokens and float32 `[B]` log softmax(logits / temperature) of them, before top-k and top-p.

        The logits may be overwritten. A row depends on no other row.
        """
        if self._choice.all_greedy:
            return self._choice(logits_BV, None, self._never)
        uniform_B1 = next(self._uniforms, None)
        if uniform_B1 is None:
            self._uniforms = self._next_uniforms()
            uniform_B1 = next(self._uniforms)
        return self._choice(logits_BV, uniform_B1, self._never)

    def _next_uniforms(self) -> Iterator[torch.Tensor]:
        """Those of the next passes, `[B, 1]` each."""
        passes = np.arange(_AHEAD)[:, None]
        numbers = uniforms(self._choice_B["stream"], self._choice_B["made"] + passes)
        return iter(torch.from_numpy(numbers).to(self._device)[..., None].unbind())


def most_probable(logits_BV: torch.Tensor, temperature_B: Array, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[B, count]` tokens, the most probable first, and float32 `[B, count]` log softmax(logits / temperature).

    The temperature of greedy rows, 0, stands for 1, as in `sample`.
    """
    divisor_B = np.where(temperature_B == 0, 1, temperature_B).astype(np.float32)
    scaled_BV = logits_BV.float() / torch.from_numpy(divisor_B).to(logits_BV.device)[:, None]
    logprob_BK, token_BK = scaled_BV.log_softmax(-1).topk(min(count, logits_BV.shape[1]))
    return token_BK, logprob_BK
