"""Trajectory -> Score: the reward of every trajectory of a step, or the reason why it has none."""

from __future__ import annotations

import logging
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tandem.config import RewardConfig
from tandem.errors import RewardShareExceeded, UserError
from tandem.reward.functions import Kind, check_functions, load, no_built_in, weighted
from tandem.reward.rules import BUILT_IN
from tandem.reward.verdicts import STATISTICS, Failure, Verdict
from tandem.reward.worker_main import Call
from tandem.reward.workers import WorkerPool
from tandem.types import Group, Score, Status, StepMetrics, Trajectory

_log = logging.getLogger("tandem.reward")

Judged = tuple[int, Verdict, float]
"""Index of the function, its verdict on a trajectory, seconds."""


class RewardManager:
    """Scores groups of siblings in worker processes, by the configured functions or by `data_source`.

    `close` when done; one thread makes and uses it (see WorkerPool). The same seed, data row, sample and step give a
    reward function the same random numbers.
    """

    def __init__(self, config: RewardConfig, seed: int = 0) -> None:
        """Raises UserError when a function cannot be loaded."""
        check_functions(config, ())
        self._config = config
        self._seed = seed
        self._functions = [load(reference) for reference, _ in weighted(config)]
        self._weights = [weight for _, weight in weighted(config)]
        self._references = [function.reference for function in self._functions]
        self._names = _part_names(self._references)
        self._shown: set[str] = set()
        self._pool = WorkerPool(self._references, config.workers, config.timeout_s)

    def score(self, siblings: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """One group for each list of siblings, in order. Aborted trajectories are not sent and count as not scored."""
        calls: list[Call] = []
        targets: list[tuple[int, list[tuple[int, int]]]] = []
        for number, trajectories in enumerate(siblings):
            alive = [(number, i) for i, t in enumerate(trajectories) if t.status is not Status.ABORTED]
            for function in self._applicable(trajectories[0].prompt.data_source) if alive else ():
                together = self._functions[function].kind is Kind.TRL
                for places in [alive] if together else [[place] for place in alive]:
                    calls.append(self._call(function, [trajectories[i] for _, i in places], step))
                    targets.append((function, places))
        judged: defaultdict[tuple[int, int], list[Judged]] = defaultdict(list)
        for (function, places), result in zip(targets, self._pool.run(calls), strict=True):
            for place, verdict in zip(places, result.verdicts, strict=True):
                judged[place].append((function, verdict, result.seconds / len(places)))
        return [
            Group(trajectories, [self._combine(judged[number, i]) for i in range(len(trajectories))])
            for number, trajectories in enumerate(siblings)
        ]

    def check_share(self, groups: Iterable[Group]) -> None:
        """Raises RewardShareExceeded when too many of a step's trajectories lost their reward."""
        scores = [score for group in groups for score in group.scores]
        lost = [s for s in scores if s.failure in (Status.REWARD_ERROR, Status.REWARD_TIMEOUT)]
        if len(lost) > self._config.max_error_share * len(scores):
            timeouts = sum(score.failure is Status.REWARD_TIMEOUT for score in lost)
            raise RewardShareExceeded(
                f"{len(lost)} of {len(scores)} trajectories lost their reward ({len(lost) - timeouts} to errors, "
                f"{timeouts} to time-outs), more than reward.max_error_share = {self._config.max_error_share:g}. "
                f"The first:\n{lost[0].error}"
            )

    def close(self) -> None:
        """End the workers. Safe to repeat."""
        self._pool.close()

    def _applicable(self, data_source: str) -> Iterable[int]:
        if self._config.functions:
            return range(len(self._functions))
        if data_source not in BUILT_IN:
            raise UserError(no_built_in(data_source))
        return [self._references.index(BUILT_IN[data_source])]

    def _call(self, function: int, trajectories: list[Trajectory], step: int) -> Call:
        first = trajectories[0]
        return Call(
            reference=self._references[function],
            seed=zlib.crc32(f"{self._seed}/{first.prompt.index}/{first.sample}/{step}".encode()),
            places=tuple(f"row {t.prompt.index}, sample {t.sample}" for t in trajectories),
            rows=tuple(pickle.dumps(self._functions[function].arguments(t)) for t in trajectories),
        )

    def _combine(self, judged: list[Judged]) -> Score:
        seconds = sum(each for _, _, each in judged)
        for failure in filter(None, (verdict.failure for _, verdict, _ in judged)):
            self._show(failure)
            status = Status.REWARD_TIMEOUT if failure.timed_out else Status.REWARD_ERROR
            return Score(None, failure=status, error=failure.message, seconds=seconds)
        valued = [(function, verdict, verdict.value) for function, verdict, _ in judged if verdict.value is not None]
        if not valued:
            reason = "no reward function applies" if judged else "generation was aborted"
            return Score(None, failure=Status.NOT_SCORED, error=reason, seconds=seconds)
        return Score(
            value=sum(self._weights[function] * value for function, _, value in valued),
            parts=self._parts(valued),
            prediction=next((verdict.prediction for _, verdict, _ in valued if verdict.prediction is not None), None),
            seconds=seconds,
        )

    def _parts(self, valued: list[tuple[int, Verdict, float]]) -> dict[str, float]:
        """Of one function as they are; of several, each one's reward, its parts under its name, and the first `acc`."""
        if not self._config.functions or len(self._functions) == 1:
            return dict(valued[0][1].parts)
        parts: dict[str, float] = {}
        for function, verdict, value in valued:
            name = self._names[function]
            parts[name] = value
            for part, number in verdict.parts.items():
                parts.setdefault("acc" if part == "acc" else f"{name}/{part}", number)
        return parts

    def _show(self, failure: Failure) -> None:
        if failure.site not in self._shown:
            self._shown.add(failure.site)
            _log.error("%s\n(shown once; all are counted in reward/errors and reward/timeouts)", failure.message)


def metrics(groups: Iterable[Group]) -> StepMetrics:
    """Statistics over the trajectories that have a reward, means of its parts, and counts of those that have none."""
    scores = [score for group in groups for score in group.scores]
    values = np.array([score.value for score in scores if score.value is not None], dtype=np.float64)
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    result: StepMetrics = {f"reward/{name}": float(np.mean(numbers)) for name, numbers in sorted(parts.items())}
    if len(values):
        result |= {f"reward/{name}": float(getattr(values, name)()) for name in ("mean", "max", "min", "std")}
    failures = Counter(score.failure for score in scores)
    return result | {
        "reward/errors": float(failures[Status.REWARD_ERROR]),
        "reward/timeouts": float(failures[Status.REWARD_TIMEOUT]),
        "reward/not_scored": float(failures[Status.NOT_SCORED]),
    }


def _part_names(references: list[str]) -> list[str]:
    """A function's own name where it is free, else its reference."""
    names = [reference.rpartition(":")[2] for reference in references]
    free = {name for name, count in Counter(names).items() if count == 1} - STATISTICS - {"acc"}
    return [name if name in free else reference for name, reference in zip(names, references, strict=True)]
