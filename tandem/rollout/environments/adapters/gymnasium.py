"""Gymnasium's environments with Text spaces, and objects that have its `reset` and `step`."""

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from tandem.config.ecosystem import GymnasiumConfig
from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.environments.adapters.base import EnvironmentRefused, Episode, Step, as_text


def open_library(config: GymnasiumConfig) -> "_Gymnasium":
    """Raises EnvironmentRefused where the environment cannot be made, or speaks in anything but text."""
    library = _Gymnasium(config.environment, config.arguments)
    try:
        _close(library.make())
    except EnvironmentRefused:
        raise
    except Exception as error:
        raise EnvironmentRefused(f"{library.name} cannot be made: {type(error).__name__}: {error}") from error
    return library


class _Gymnasium:
    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._arguments = arguments
        self._kind = _own_kind(name) if name.rpartition(":")[0].endswith(".py") else None

    def make(self) -> Any:
        """Raises EnvironmentRefused where its spaces are not Text; an object without spaces shows them as it runs."""
        made: Any
        made = self._kind(**self._arguments) if self._kind else gymnasium.make(self.name, **self._arguments)
        for what in ("observation_space", "action_space"):
            space = getattr(made, what, None)
            if space is not None and not isinstance(space, Text):
                raise EnvironmentRefused(f"{self.name}: {what} is {space}, not Text; wrap it so that it speaks in text")
        return made

    def begin(self, seed: int, options: Mapping[str, Any]) -> Episode:
        made = self.make()
        observation, _ = made.reset(seed=seed, **({"options": dict(options)} if options else {}))
        return _GymnasiumEpisode(made, as_text(observation, self.name), self.name)


class _GymnasiumEpisode:
    def __init__(self, made: Any, observation: str, name: str) -> None:
        self.observation = observation
        self._made = made
        self._name = name
        self._actions: Text | None = getattr(made, "action_space", None)

    def step(self, action: str) -> Step:
        if self._actions is not None and not self._actions.contains(action):
            return Step(f"error: no action: {_rule_of(self._actions, action)}", was_refused=True)
        observation, reward, terminated, truncated, _ = self._made.step(action)
        return Step(as_text(observation, self._name), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        _close(self._made)


def _close(made: Any) -> None:
    """Objects of the user's own may have nothing to close."""
    if callable(close := getattr(made, "close", None)):
        close()


def _own_kind(reference: str) -> Any:
    try:
        kind = load_named(reference, "")
    except UserError as error:
        raise EnvironmentRefused(str(error).strip()) from None
    if not callable(kind):
        raise EnvironmentRefused(f"there is no class or function {reference!r}")
    return kind


def _rule_of(space: Text, action: str) -> str:
    """Which rule of the space an action breaks."""
    if not space.min_length <= len(action) <= space.max_length:
        return f"it has {len(action)} characters, not {space.min_length} to {space.max_length}"
    others = sorted(set(action) - set(space.character_set))
    return f"it holds {', '.join(map(repr, others))}; allowed are the characters {space.characters!r}"
