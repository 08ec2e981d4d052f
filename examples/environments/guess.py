"""A number to guess, as a Gymnasium environment whose observations and actions are texts."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text


class Guess(gymnasium.Env[str, str]):
    """The reward is 1 for the number, and small for every other that was a number at all."""

    observation_space = Text(max_length=100, charset="".join(map(chr, range(32, 127))))
    action_space = Text(min_length=0, max_length=10_000, charset=frozenset(map(chr, range(0x3000))))

    def __init__(self, highest: int = 9) -> None:
        self._highest = highest
        self._number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(1, self._highest + 1))
        return f"I think of a number from 1 to {self._highest}. Which is it?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        said = action.strip()
        if not (said.isascii() and said.isdigit()):
            return "Say a number.", 0.0, False, False, {}
        if int(said) == self._number:
            return "Yes.", 1.0, True, False, {}
        return "It is more." if int(said) < self._number else "It is less.", 0.1, False, False, {}
