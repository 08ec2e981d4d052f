"""How long the answers are: drawn by the number of the draw alone, so that every staleness answers the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from tandem.errors import UserError

GroupLengths = tuple[Sequence[float], int]
"""The tokens of each answer to a prompt, and of the prompt."""
_AT_ONCE = 512
"""Draws that are made together."""
_QUANTILES = 20_000
_MISSED = 0.02
"""The mean may be missed by so much of itself: a length is a whole number of tokens."""


class Lengths(Protocol):
    """Lengths by draw, the same whenever they are asked for."""

    def of(self, draw: int) -> GroupLengths: ...


@dataclass(slots=True)
class LognormalLengths:
    """exp(mu + prompt's part + answer's part), both parts normal, cut at the longest that may be."""

    samples: int
    mean: float
    """Of the lengths, once they are cut."""
    sigma: float
    """Standard deviation of the logarithm before."""
    longest: int
    prompt_tokens: int = 0
    prompt_share: float = 0.5
    """Share of the logarithm's variance that siblings have in common."""
    seed: int = 0
    _drawn: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    _mu: float = 0.0

    def __post_init__(self) -> None:
        """Raises UserError where no lengths have this mean."""
        self._mu = _location(self.mean, self.sigma, self.longest)

    def of(self, draw: int) -> GroupLengths:
        part, place = divmod(draw, _AT_ONCE)
        if part not in self._drawn:
            self._drawn.pop(part - 64, None)
            self._drawn[part] = self._draw(part)
        return self._drawn[part][place], self.prompt_tokens

    def _draw(self, part: int) -> list[list[float]]:
        random = np.random.default_rng((self.seed, part))
        of_prompts = random.standard_normal((_AT_ONCE, 1)) * np.sqrt(self.prompt_share)
        of_answers = random.standard_normal((_AT_ONCE, self.samples)) * np.sqrt(1 - self.prompt_share)
        logs = self._mu + self.sigma * (of_prompts + of_answers)
        return _cut(logs, self.longest).tolist()


@dataclass(slots=True)
class RecordedLengths:
    """The groups of a run, whole ones, drawn again and again."""

    groups: Sequence[GroupLengths]
    samples: int
    seed: int = 0

    def of(self, draw: int) -> GroupLengths:
        random = np.random.default_rng((self.seed, draw))
        lengths, prompt_tokens = self.groups[int(random.integers(len(self.groups)))]
        if len(lengths) != self.samples:
            lengths = random.choice(lengths, self.samples).tolist()
        return lengths, prompt_tokens


def _location(mean: float, sigma: float, longest: int) -> float:
    """mu, with which cut lengths have this mean. Raises UserError where none has."""
    normal = NormalDist()
    logs = sigma * np.array([normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)])
    low, high = -6 * sigma - 1, float(np.log(longest)) + 6 * sigma  # all lengths are 1 at low, and the longest at high
    for _ in range(60):
        middle = (low + high) / 2
        if _cut(middle + logs, longest).mean() < mean:
            low = middle
        else:
            high = middle
    found = float(_cut(high + logs, longest).mean())
    if abs(found - mean) > _MISSED * mean:
        raise UserError(
            f"answers of {mean:g} tokens on average cannot be with a deviation of {sigma:g}: the nearest is {found:g}"
        )
    return high


def _cut(logs: np.ndarray[Any, Any], longest: int) -> np.ndarray[Any, Any]:
    """Logarithms -> lengths, whole tokens from 1 on."""
    return np.clip(np.rint(np.exp(logs)), 1, longest)
