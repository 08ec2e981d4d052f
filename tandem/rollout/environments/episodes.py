"""What environments of other libraries have in common: a row's seed, observations as messages, rewards."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tandem.errors import UserError
from tandem.rollout.environment import EnvironmentFailed, Reply
from tandem.rollout.environments.tools import opening_messages, with_more
from tandem.types import Message, Prompt


class Episode:
    """How far one conversation has come."""

    def __init__(self) -> None:
        self._rewarded = False
        self._done = False

    def opening(self, prompt: Prompt, observation: str) -> Sequence[Message]:
        """The row's messages, with the first observation at the end."""
        return with_more(opening_messages(prompt), observation)

    def reply(self, observation: str, reward: float | None, done: bool) -> Reply:
        self._rewarded |= reward is not None
        self._done = done
        return Reply(() if done else [{"role": "user", "content": observation}], reward)

    def reward_of_rest(self) -> float | None:
        """0 where the conversation was cut short before any reward: it has earned nothing, which is no failure."""
        return None if self._done or self._rewarded else 0.0


def seed_of(prompt: Prompt) -> int:
    """The row's column `seed`, else its place in the data. Raises EnvironmentFailed."""
    seed = prompt.row.get("seed")
    if seed is None:
        return prompt.index
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFailed(f"data row {prompt.index}: column `seed` is {seed!r}, not a whole number from 0")
    return seed


def options_of(prompt: Prompt) -> Mapping[str, Any]:
    """The row's column `options`, without entries that are null: parquet gives every row those of all rows. Raises
    EnvironmentFailed where they are none that JSON can hold."""
    given = prompt.row.get("options")
    if given is not None and not isinstance(given, dict):
        raise EnvironmentFailed(f"data row {prompt.index}: column `options` is {given!r:.100}, not an object")
    options = {name: value for name, value in (given or {}).items() if value is not None}
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"data row {prompt.index}: column `options` is no JSON: {error}") from None
    return options


def need_package(package: str, kind: str) -> None:
    """Raises UserError unless it is installed; importing it is left to the process that uses it."""
    if find_spec(package) is None:
        raise UserError(
            f"conversation.environment.type: {kind}: needs the package {package}, which is not installed; "
            f"pip install -e '.[{kind}]' in a clone of Tandem"
        )
