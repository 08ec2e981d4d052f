"""Trajectory -> Score: the reward of every trajectory of a step, or the reason why it has none."""

import logging
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.config.reward import RewardConfig
from tandem.errors import RewardShareExceeded, UserError, for_terminal
from tandem.reward.functions import Kind, RewardCall, RewardFunction, check_functions, column_value
from tandem.reward.progress import UNDER_WAY, ScoringProgress
from tandem.reward.rules import BUILT_IN
from tandem.reward.workers import WorkerPool
from tandem.types import Group, Prompt, Score, Status, StepMetrics, Trajectory

_log = logging.getLogger("tandem.reward")
_FAILURES = (Status.REWARD_ERROR, Status.REWARD_TIMEOUT)
_ENVIRONMENT = "environment"
"""The name of the part that the environment gives."""
_NOT_SENT = (Status.ABORTED, Status.ENVIRONMENT_ERROR)
_LOST = {
    "lost their reward to errors and time-outs": _FAILURES,
    "were lost to environments that failed": (Status.ENVIRONMENT_ERROR,),
}
_UNDER_WAY = Score(None, failure=Status.NOT_SCORED, error=UNDER_WAY)
_to_come: ContextVar[int | None] = ContextVar("to_come", default=None)
"""Where `score` ends early: how many answers that it is not given count in the share of those that were lost."""
_Job = tuple[RewardFunction, list[Trajectory], RewardCall]
"""A function, the trajectories that it scores, and the call that scores them."""


@contextmanager
def ending_early(to_come: int = 0) -> Iterator[None]:
    """Meanwhile `RewardManager.score` raises RewardShareExceeded as soon as `check_share` of its answers, and of so
    many others that may come yet, is bound to."""
    before = _to_come.set(to_come)
    try:
        yield
    finally:
        _to_come.reset(before)


class RewardManager:
    """Scores groups of siblings in worker processes, by the configured functions or by `data_source`.

    `close` when done. The same seed, data row, sample and step give a reward function the same random numbers.
    Who submits groups waits for `connections` and then calls `poll`, at least every second while there are some.

    A subclass may override `score`: then training calls it with the answers of a whole step. One that overrides
    `submit` too has each group scored as soon as its answers are there.
    """

    def __init__(self, config: RewardConfig, seed: int = 0, *, needed: bool = True) -> None:
        """Raises UserError when a function cannot be loaded. `needed`: something is learned from the rewards."""
        self._config = config
        self._seed = seed
        self._needed = needed
        self._functions = {function.reference: function for function in check_functions(config, ())}
        self._has_scored = False
        """Some trajectory had a reward in a check of the share."""
        self._shown: set[tuple[str, Status | None]] = set()
        given = {reference: function.given for reference, function in self._functions.items()}
        self._pool = WorkerPool(given, config.workers, config.timeout_s, config.import_timeout_s)
        self._submitted: dict[int, Sequence[_Job]] = {}
        """What scores each group that was submitted, by the `id` of its first trajectory."""

    @property
    def by_step(self) -> bool:
        """Whether groups of a step must be scored together: only `score` is right then."""
        return self._overrides_score_alone or any(function.score_together for function in self._functions.values())

    def score(self, answers_by_prompt: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """One group for each prompt's answers, in order. Trajectories that were aborted are not sent and count as not
        scored; those whose environment failed are not sent and have failed.

        Waits; what was submitted is scored meanwhile. Raises what `poll` raises, RewardShareExceeded within
        `ending_early`, and StepGivenUp where the run is to stop and scores do not come.
        """
        jobs = list(self._jobs(answers_by_prompt, step))
        self._pool.run([call for _, _, call in jobs], self._looking(answers_by_prompt, jobs))
        return self._groups(answers_by_prompt, jobs)

    def submit(
        self, answers_by_prompt: Sequence[list[Trajectory]], step: int, done: Callable[[list[Group]], None]
    ) -> None:
        """Have them scored as `score` does; a later `poll` gives `done` the groups. After `close` none does."""
        jobs = list(self._jobs(answers_by_prompt, step))
        known = [id(group[0]) for group in answers_by_prompt if group]
        self._submitted |= dict.fromkeys(known, jobs)

        def scored() -> None:
            for group in known:
                self._submitted.pop(group, None)
            done(self._groups(answers_by_prompt, jobs))

        self._pool.add([call for _, _, call in jobs], scored)

    def so_far(self, siblings: list[Trajectory]) -> Group:
        """A submitted group as it stands: answers that are still being scored have no score, and `UNDER_WAY` as the
        reason."""
        jobs = self._submitted.get(id(siblings[0]))
        if jobs is None:
            return Group(siblings, [_UNDER_WAY for _ in siblings])
        return self._groups([siblings], jobs)[0]

    @property
    def failed_calls(self) -> int:
        """Calls of functions that have failed, of all that were ever made: a sign to look at the share."""
        return self._pool.failed

    def connections(self) -> Sequence[Any]:
        """One of them is readable when `poll` has something to do; empty when nothing is under way."""
        return self._pool.connections()

    def poll(self) -> None:
        """Take in scores, hand out calls, and pass on groups that are complete, and not wait for anything.

        Raises TandemError when a worker process cannot start, and what `done` raises.
        """
        self._pool.poll()

    def check_share(self, groups: Iterable[Group]) -> None:
        """Raises RewardShareExceeded when too many of the trajectories of a step or a validation lost their reward, or
        their environments failed; and where neither a function nor an environment has given any of them a reward, nor,
        where there are functions, any of those that were checked before."""
        groups = list(groups)
        scores = [score for group in groups for score in group.scores]
        self._has_scored |= any(score.value is not None for score in scores)
        none = scores and all(score.failure is Status.NOT_SCORED for score in scores)
        if none and self._needed and not (self._config.functions and self._has_scored):
            raise RewardShareExceeded(
                f"none of {len(scores)} trajectories has a reward: {self._why_none(groups)}", groups
            )
        for how, failures in _LOST.items():
            lost = [score for score in scores if score.failure in failures]
            if len(lost) > self._config.max_error_share * len(scores):
                raise RewardShareExceeded(
                    f"{len(lost)} of {len(scores)} trajectories {how}, more than reward.max_error_share = "
                    f"{self._config.max_error_share:g}. The first:\n{lost[0].error}",
                    groups,
                )

    def _why_none(self, groups: Sequence[Group]) -> str:
        """Of groups that nothing has scored, and in which nothing failed."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if all(trajectory.status is Status.ABORTED for trajectory in trajectories):
            return "their generation was called off"
        if not self._config.functions:
            return (
                "their environments gave none, no function is in reward.functions, and none is built in for "
                f"data_source {trajectories[0].prompt.data_source!r}"
            )
        named = " and ".join(self._functions)
        return (
            f"{named} returned None for all of them, which means that the function does not apply, and nothing had a "
            "reward before. Give rows to which one applies, or return a number"
        )

    def forget(self) -> None:
        """Nobody wants the groups that were submitted, as those of a run that goes on from an earlier step."""
        self._submitted.clear()
        self._pool.forget()

    def close(self) -> None:
        """End the workers, whatever is under way. Safe to repeat."""
        self._pool.close()

    @property
    def _overrides_score_alone(self) -> bool:
        """A subclass defines `score`, and neither it nor one derived from it defines `submit`."""
        nearest = next(kind for kind in type(self).__mro__ if "score" in vars(kind) or "submit" in vars(kind))
        return "submit" not in vars(nearest)

    def _applicable(self, siblings: Sequence[Trajectory]) -> Iterable[RewardFunction]:
        """The functions that score these. Without any in the configuration the environment's reward stands for all
        siblings, and where it gives none, the row's own function for all of them, if there is one."""
        data_source = siblings[0].prompt.data_source
        if self._config.functions:
            return self._functions.values()
        judged = any(t.reward is not None for t in siblings)
        if judged or (data_source not in BUILT_IN and (not self._needed or any(t.messages for t in siblings))):
            return ()
        if data_source not in BUILT_IN or BUILT_IN[data_source] not in self._functions:
            self._functions |= {f.reference: f for f in check_functions(self._config, [data_source])}
        return [self._functions[BUILT_IN[data_source]]]

    def _jobs(self, answers_by_prompt: Sequence[list[Trajectory]], step: int) -> Iterator[_Job]:
        """What scores these groups; `score_together` joins those of them that are alike."""
        together: defaultdict[tuple[str, Any], list[tuple[Trajectory, bytes]]] = defaultdict(list)
        for group in answers_by_prompt:
            alive = [t for t in group if t.status not in _NOT_SENT]
            for function in self._applicable(alive) if alive else ():
                arguments = function.arguments(group[0].prompt)
                shared = pickle.dumps(arguments)
                own = (function.conversation(t) for t in alive)
                scored = [
                    (t, pickle.dumps({**arguments, **o}) if o else shared) for t, o in zip(alive, own, strict=True)
                ]
                if function.score_together:
                    together[function.reference, _alike(group[0].prompt, function.score_together)] += scored
                elif function.kind is Kind.TRL:
                    yield self._job(function, scored, step)
                else:
                    yield from (self._job(function, [one], step) for one in scored)
        for (reference, _), scored in together.items():
            yield self._job(self._functions[reference], scored, step)

    def _job(self, function: RewardFunction, scored: list[tuple[Trajectory, bytes]], step: int) -> _Job:
        """One call for these trajectories, each with its pickled arguments."""
        trajectories, arguments = [t for t, _ in scored], [pickled for _, pickled in scored]
        seed = zlib.crc32(f"{self._seed}/{trajectories[0].prompt.index}/{trajectories[0].sample}/{step}".encode())
        completions = [function.completion(t) for t in trajectories]
        return function, trajectories, RewardCall(function.reference, seed, arguments, completions)

    def _looking(self, answers_by_prompt: Sequence[list[Trajectory]], jobs: Sequence[_Job]) -> Callable[[], None]:
        """What to do between the turns that score these: say how far it is, and end it where that is certain."""
        progress, to_come, failed = ScoringProgress(sum(map(len, answers_by_prompt))), _to_come.get(), self.failed_calls

        def look() -> None:
            nonlocal failed
            has_failed = to_come is not None and self.failed_calls > failed
            if not has_failed and not progress.is_due():
                return
            groups = self._groups(answers_by_prompt, jobs)
            progress.tell(groups)
            if has_failed:
                failed = self.failed_calls
                check_share_early(self.check_share, groups, to_come or 0)

        return look

    def _groups(self, answers_by_prompt: Sequence[list[Trajectory]], jobs: Sequence[_Job]) -> list[Group]:
        """The groups of these answers_by_prompt, as far as the jobs' calls have scores."""
        scores: defaultdict[int, list[tuple[RewardFunction, Score]]] = defaultdict(list)
        """Each trajectory's, by its `id`: one of each function that applies."""
        for function, trajectories, call in jobs:
            for trajectory, score in zip(trajectories, call.scores or [_UNDER_WAY] * len(trajectories), strict=True):
                scores[id(trajectory)].append((function, score))
        return [Group(group, [self._known(t, scores[id(t)]) for t in group]) for group in answers_by_prompt]

    def _known(self, trajectory: Trajectory, scores: list[tuple[RewardFunction, Score]]) -> Score:
        """What is sure: a score that other functions would still change is none."""
        under_way = any(score is _UNDER_WAY for _, score in scores)
        if under_way and not any(score.failure in _FAILURES for _, score in scores):
            return _UNDER_WAY
        return self._combine(trajectory, scores)

    def _combine(self, trajectory: Trajectory, scores: list[tuple[RewardFunction, Score]]) -> Score:
        """The weighted sum of what the functions and its environment gave one trajectory, or the first failure.

        Of several rewards each one is a part too; where names of parts meet, the first function's counts.
        """
        if trajectory.status is Status.ENVIRONMENT_ERROR:
            return Score(None, failure=trajectory.status, error=trajectory.error)
        if trajectory.status is Status.ABORTED:  # whatever its environment has given until then
            return Score(None, failure=Status.NOT_SCORED)
        if (
            trajectory.reward is None
            and len(scores) == 1
            and scores[0][0].weight == 1
            and scores[0][1].value is not None
        ):
            return scores[0][1]
        seconds = sum(score.seconds for _, score in scores)
        for function, score in scores:
            if score.failure in _FAILURES:
                place = f"row {trajectory.prompt.index}, sample {trajectory.sample}"
                error = f"reward function {function.reference!r} on {place}: {score.error}"
                if (function.reference, score.failure) not in self._shown:
                    self._shown.add((function.reference, score.failure))
                    counted = "(the first of its kind; all are counted in reward/errors, timeouts)"
                    _log.error("%s\n%s", for_terminal(error), counted)
                return replace(score, error=error, seconds=seconds)
        weighted = [(f.name, f.weight * s.value, s.value) for f, s in scores if s.value is not None]
        if trajectory.reward is not None:
            weighted.append((_ENVIRONMENT, self._environment_weight * trajectory.reward, trajectory.reward))
        if not weighted:
            return Score(None, failure=Status.NOT_SCORED, seconds=seconds)
        several = len(scores) > 1 or trajectory.reward is not None
        parts = {name: value for name, _, value in weighted} if several else {}
        valued = [score for _, score in scores if score.value is not None]
        for score in valued:
            parts = {**score.parts, **parts}
        return Score(
            value=sum(share for _, share, _ in weighted),
            parts=parts,
            prediction=next((score.prediction for score in valued if score.prediction is not None), None),
            error="; ".join(score.error for score in valued if score.error) or None,
            seconds=seconds,
            environment_weight=0.0 if trajectory.reward is None else self._environment_weight,
        )

    @property
    def _environment_weight(self) -> float:
        return self._config.environment_weight if self._config.functions else 1.0


def check_share_early(check: Callable[[Iterable[Group]], None], groups: Sequence[Group], to_come: int) -> None:
    """Raises RewardShareExceeded where `check`, a `check_share`, is bound to, whatever comes of the answers of these
    groups that are being scored, and of `to_come` others."""
    if not any(score.failure in failures for group in groups for score in group.scores for failures in _LOST.values()):
        return
    try:
        check([*groups, Group([], [_UNDER_WAY for _ in range(to_come)])])
    except RewardShareExceeded as error:
        left = to_come + sum(score.error == UNDER_WAY for group in groups for score in group.scores)
        not_waited = f"\n{left:,} other answers were not waited for" if left else ""
        raise RewardShareExceeded(f"{error}{not_waited}", groups) from None


def _alike(prompt: Prompt, column: str) -> Any:
    """What prompts that are scored together have in common. Raises UserError where this one has no such column."""
    try:
        return column_value(prompt, column)
    except KeyError:
        place = f"data row {prompt.index}"
        raise UserError(f"reward.functions: score_together: {column}, but {place} has no such column") from None


def metrics(groups: Iterable[Group]) -> StepMetrics:
    """Statistics over the trajectories that have a reward, means of its parts, and counts of those that have none.

    The mean of a part is over those that have it; where some have not, `<part>/share` says how many have, of those that
    have a reward.
    """
    scores = [score for group in groups for score in group.scores]
    scored = [score for score in scores if score.value is not None]
    values = np.array([score.value for score in scored], dtype=np.float64)
    failures = Counter(score.failure for score in scores)
    statistics = {name: float(getattr(values, name)()) for name in ("mean", "max", "min", "std") if len(values)}
    statistics["errors"] = float(failures[Status.REWARD_ERROR])
    statistics["timeouts"] = float(failures[Status.REWARD_TIMEOUT])
    statistics["not_scored"] = float(failures[Status.NOT_SCORED])
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for score in scored for item in score.parts.items()):
        parts[name].append(value)
    shares = {f"{name}/share": len(of) / len(scored) for name, of in parts.items() if len(of) < len(scored)}
    if taken := (statistics | shares).keys() & parts.keys():
        raise UserError(f"reward functions or their parts are named {sorted(taken)}, which are metrics; rename them")
    statistics |= {name: float(np.mean(numbers)) for name, numbers in parts.items()} | shares
    return {f"reward/{name}": value for name, value in statistics.items()}
