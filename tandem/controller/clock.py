"""Where the time of a step goes."""

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tandem.activity import begin
from tandem.types import Group, StepMetrics

R = TypeVar("R")


@dataclass(slots=True)
class Clock:
    """Runs stages and adds up the seconds of each as `time/<stage>_s`."""

    now: Callable[[], float] = time.perf_counter
    seconds: StepMetrics = field(default_factory=dict[str, float])

    def __call__(self, stage: str, run: Callable[[], R]) -> R:
        begin(stage)
        start = self.now()
        result = run()
        name = f"time/{stage}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
        return result


@dataclass(slots=True)
class RolloutTimes:
    """How long training waits for groups, and how many steps ahead they would have to be made for it not to wait."""

    now: Callable[[], float]
    _waited_s: float = 0.0
    _waited_for_rewards_s: float = 0.0
    _took_at: float = 0.0
    _longest_s: float = 0.0
    """From asking to the score."""
    _settled_s: float = 0.0
    _training_s: float = 0.0

    @contextmanager
    def taking(self) -> Generator[None]:
        """A step takes its groups."""
        start, self._waited_for_rewards_s = self.now(), 0.0
        yield
        self._took_at, self._settled_s = self.now(), 0.0
        self._waited_s = self._took_at - start

    @contextmanager
    def waiting(self, for_rewards: bool) -> Generator[None]:
        """Some of that time; `for_rewards`: nothing lacks but scores."""
        start = self.now()
        yield
        if for_rewards:
            self._waited_for_rewards_s += self.now() - start

    @contextmanager
    def settling(self) -> Generator[None]:
        """What runs is waited for after the step has taken its groups."""
        start = self.now()
        yield
        self._settled_s += self.now() - start

    def took(self, groups: Iterable[Group]) -> None:
        self._longest_s = max(_seconds(group) for group in groups)

    def published(self) -> None:
        """The step has been trained, and its weights are served."""
        self._training_s = self.now() - self._took_at - self._settled_s

    def metrics(self) -> StepMetrics:
        """`perf/wanted_staleness`: from this k on the longest answer of the step, with its scoring, does not make the
        trainer wait, where generation has devices of its own: (longest + training) / (k + 1) <= training."""
        wanted = math.ceil(self._longest_s / self._training_s) if self._training_s > 0 else 0
        return {
            "time/generation_s": self._waited_s - self._waited_for_rewards_s,
            "time/reward_s": self._waited_for_rewards_s,
            "perf/wanted_staleness": float(wanted),
        }


def _seconds(group: Group) -> float:
    return max(one.generation_s for one in group.trajectories) + max((one.seconds for one in group.scores), default=0.0)
