"""TextArena's games for one player. What is no move the game itself says; it may end the game."""

from collections.abc import Mapping
from typing import Any

import textarena

from tandem.config.ecosystem import TextArenaConfig
from tandem.rollout.environments.adapters.base import EnvironmentRefused, Episode, Step, as_text


def open_library(config: TextArenaConfig) -> "_TextArena":
    """Raises EnvironmentRefused where there is no such game, or it is not for one player."""
    library = _TextArena(config.environment, config.arguments)
    try:
        library.begin(0, {}).close()
    except EnvironmentRefused:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentRefused(
            f"{library.name} cannot be played by one player: {type(error).__name__}: {error}"
        ) from error
    return library


class _TextArena:
    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._arguments = arguments

    def begin(self, seed: int, options: Mapping[str, Any]) -> Episode:
        game = textarena.make(self.name, **{**self._arguments, **options})
        game.reset(num_players=1, seed=seed)
        return _Game(game, self.name)


class _Game:
    def __init__(self, game: Any, name: str) -> None:
        self._game = game
        self._name = name
        self._seen = ""
        """What the game showed last: most games show all that was said so far."""
        self.observation = self._news()

    def step(self, action: str) -> Step:
        done, _ = self._game.step(action=action)
        if not done:
            return Step(self._news())
        rewards, _ = self._game.close()
        return Step("", None if rewards is None else float(rewards[0]), done=True)

    def close(self) -> None: ...

    def _news(self) -> str:
        """What the game shows now, without what it showed before."""
        _, shown = self._game.get_observation()
        text = as_text(shown, self._name)
        news = text.removeprefix(self._seen)
        self._seen = text
        return news.strip("\n")
