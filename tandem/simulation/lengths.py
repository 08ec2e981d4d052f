"""How long the answers are: drawn by the number of the draw alone, so that every staleness answers the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Drawn = tuple[Sequence[float], int]
"""The tokens of each answer to a prompt, and of the prompt."""
_AT_ONCE = 512
"""Draws that are made together."""


class Lengths(Protocol):
    """Lengths by draw, the same whenever they are asked for."""

    def of(self, draw: int) -> Drawn: ...


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
        self._mu = _location(self.mean, self.sigma, self.longest)

    def of(self, draw: int) -> Drawn:
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
        return np.clip(np.rint(np.exp(logs)), 1, self.longest).tolist()


@dataclass(slots=True)
class RecordedLengths:
    """The groups of a run, whole ones, drawn again and again."""

    groups: Sequence[Drawn]
    samples: int
    seed: int = 0

    def of(self, draw: int) -> Drawn:
        random = np.random.default_rng((self.seed, draw))
        lengths, prompt_tokens = self.groups[int(random.integers(len(self.groups)))]
        if len(lengths) != self.samples:
            lengths = random.choice(lengths, self.samples).tolist()
        return lengths, prompt_tokens


def _location(mean: float, sigma: float, longest: int) -> float:
    """mu, with which cut lengths have this mean."""
    quantiles = np.random.default_rng(0).standard_normal(20_000)
    low, high = 0.0, float(np.log(longest)) + 6 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + sigma * quantiles), 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return high
