"""reasoning-gym's tasks: a question, and a score for the answer."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from tandem.config.ecosystem import ReasoningGymConfig
from tandem.rollout.environments.adapters.base import EnvironmentRefused, Episode, Step


def open_library(config: ReasoningGymConfig) -> "_ReasoningGym":
    """Raises EnvironmentRefused where there is no such data set, or it takes no such arguments."""
    library = _ReasoningGym(config)
    try:
        library.begin(0, {})
    except Exception as error:
        raise EnvironmentRefused(f"data set {config.dataset!r}: {type(error).__name__}: {error}") from error
    return library


class _ReasoningGym:
    def __init__(self, config: ReasoningGymConfig) -> None:
        self._config = config

    def begin(self, seed: int, options: Mapping[str, Any]) -> Episode:
        arguments = {**self._config.arguments, **options, "seed": seed, "size": 1}
        dataset = reasoning_gym.create_dataset(self._config.dataset, **arguments)
        return _Question(dataset, dataset[0], self._config.answer_tag)


class _Question:
    def __init__(self, dataset: Any, entry: Mapping[str, Any], answer_tag: str | None) -> None:
        self.observation = str(entry["question"])
        self._dataset = dataset
        self._entry = entry
        self._answer_tag = answer_tag

    def step(self, action: str) -> Step:
        answer = extract_answer(action, self._answer_tag) if self._answer_tag else action.strip()
        return Step("", float(self._dataset.score_answer(answer, self._entry)), done=True)

    def close(self) -> None: ...
