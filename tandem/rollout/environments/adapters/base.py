"""The seam to a synchronous library: a row -> an episode, texts -> texts and rewards.

open_library(config) --begin(seed, options)--> Episode --step(text)--> Step … until one is done --> close
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class EnvironmentRefused(Exception):
    """What the configuration names cannot be used; the message says why, to the user."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a library says to an action."""

    observation: str
    reward: float | None = None
    done: bool = False
    was_refused: bool = False
    """It was no action: `observation` says why, and nothing has changed."""


class Episode(Protocol):
    """One instance from its reset on. Whatever it raises is a failure of the environment.

    The global generators of `random` and numpy are the episode's own while one of its methods runs, seeded by the row.
    """

    @property
    def observation(self) -> str:
        """The first one."""
        ...

    def step(self, action: str) -> Step: ...

    def close(self) -> None: ...


class Library(Protocol):
    """A library in its process, with the settings of the run. Each adapter has a function `open_library(config)`,
    of its section of the configuration; it raises Refused where that names what is not there, or what
    cannot be spoken to in text."""

    def begin(self, seed: int, options: Mapping[str, Any]) -> Episode:
        """A fresh instance, reset. The same seed and options give the same episode."""
        ...


def as_text(observation: object, whose: str) -> str:
    """An observation that is text. Raises EnvironmentRefused."""
    if not isinstance(observation, str):
        raise EnvironmentRefused(
            f"{whose} observes {type(observation).__name__}, not text; wrap it so that it says what it sees"
        )
    return observation
