"""Continuous batching in virtual time: rows that decode side by side, a token each in every iteration.

    add --> waiting --(fewer than max_running rows)--> rows --last token--> done, once all rows of a prompt have it

An iteration of n rows with c tokens of context in all takes

    iteration_s + row_s * n + context_token_s * c

so between two ends of rows, where n is constant and c grows by n an iteration, the time of i iterations is a square in
i: nothing is computed token by token. A prompt stalls all rows for prefill_token_s a token. The native engine reads the
keys of every row as far as the longest one's, so that its c is n times the longest context.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tandem.simulation.speeds import EngineSpeed


@dataclass(slots=True)
class SimulatedAnswers:
    """The rows of one prompt."""

    number: int
    prompt_tokens: int
    lengths: Sequence[float]
    """Of each row, in tokens."""
    asked_at: float = 0.0
    ended_at: float = 0.0
    unfinished: int = 0
    """Rows that lack their last token."""
    last_end: float = 0.0
    """The iteration of the last token of the rows that have started."""
    version_tokens: float = 0.0
    """Sum over the tokens made of the version that made them."""
    oldest_version: int = 0

    @property
    def tokens(self) -> float:
        return sum(self.lengths)


_Row = tuple[float, float, int, SimulatedAnswers]
"""The iteration, counted from the engine's first one, after which it has its last token; that before its first one; a
number, so that rows are ordered; whose it is."""


@dataclass(slots=True)
class Work:
    """What an engine has done so far."""

    tokens: float = 0.0
    decoding_s: float = 0.0
    row_seconds: float = 0.0
    """Rows, times the seconds that they decoded side by side."""


@dataclass(slots=True)
class Decoding:
    """The rows of one engine. Its clock moves with `run` alone."""

    speed: EngineSpeed
    max_running: int
    padded: bool = False
    """Every row costs as much as the one with the longest context."""
    now: float = 0.0
    done: list[SimulatedAnswers] = field(default_factory=list[SimulatedAnswers])
    """Answers that are complete; who takes them clears it."""
    unfinished: int = 0
    """Rows that lack their last token, waiting ones included."""
    work: Work = field(default_factory=Work)
    _iterations: float = 0.0
    _rows: list[_Row] = field(default_factory=list[_Row])
    """By their ends."""
    _offset: float = 0.0
    """The tokens of context of all rows, or padded those of the longest, less those of the iterations so far."""
    _waiting: deque[tuple[SimulatedAnswers, float]] = field(default_factory=deque[tuple[SimulatedAnswers, float]])
    """Rows without a place: whose they are, and their lengths."""
    _stalled_until: float = 0.0
    _started: int = 0
    """Rows that have a number."""
    _version: int = 0
    _publishes: list[float] = field(default_factory=list[float])
    """The iterations at which versions came that some row has not begun with; the last one brought `_version`."""

    def add(self, answers: SimulatedAnswers) -> None:
        """Rows that start now, or when there is a place."""
        answers.asked_at, answers.unfinished = self.now, len(answers.lengths)
        self.unfinished += len(answers.lengths)
        self.stall(self.speed.prefill_token_s * answers.prompt_tokens)
        self._waiting.extend((answers, length) for length in answers.lengths)
        self._fill()

    def publish(self, version: int) -> None:
        """Tokens from now on are by the weights of this version, the one after the last."""
        first = min((row[1] for row in self._rows), default=self._iterations)
        self._publishes = [at for at in self._publishes if at > first]
        self._publishes.append(self._iterations)
        self._version = version

    def stall(self, seconds: float) -> None:
        """No row gains a token meanwhile."""
        self._stalled_until = max(self.now, self._stalled_until) + seconds

    def prefill_again(self) -> None:
        """The keys and values of all rows are to be computed anew."""
        self.stall(self.speed.prefill_token_s * self._context)

    def next_event(self, rows: int) -> float:
        """When a group will be complete or so many rows will have ended, whichever comes first; or any row, where some
        wait. Infinity where there are none."""
        speed, count, offset, iterations = self.speed, len(self._rows), self._offset, self._iterations
        when = max(self.now, self._stalled_until)
        longest = self._longest_from_each() if self.padded else []
        for place, (end, start, _, answers) in enumerate(self._rows, 1):
            ahead = end - iterations
            if ahead > 0:
                context = count * (longest[place - 1] + iterations) if longest else offset + count * iterations
                more_s = speed.context_token_s * count
                first_s = speed.iteration_s + speed.row_s * count + speed.context_token_s * context
                when += ahead * (first_s + more_s * ahead / 2)
                iterations = end
            if self._waiting or place >= rows or end >= answers.last_end:
                return when
            count -= 1
            offset -= answers.prompt_tokens - start
        return math.inf

    def _longest_from_each(self) -> list[float]:
        """Of each row and those that end after it, as `_offset` of these rows."""
        offsets = (answers.prompt_tokens - start for _, start, _, answers in reversed(self._rows))
        return list(accumulate(offsets, max))[::-1]

    def run(self, until: float) -> None:
        """Decode until then."""
        if until <= self.now:
            return
        rows, speed, work = self._rows, self.speed, self.work
        reached = until + 1e-9 * max(1.0, until)  # rounded ends that were computed as `until` are in it
        while rows:
            begin = self._stalled_until if self._stalled_until > self.now else self.now
            if begin > reached:
                break
            count, now = len(rows), self._iterations
            ahead = rows[0][0] - now
            more_s = speed.context_token_s * count
            first_s = speed.iteration_s + speed.row_s * count + speed.context_token_s * self._context
            seconds = ahead * (first_s + more_s * ahead / 2)
            ends = begin + seconds <= reached
            if not ends:
                seconds = max(0.0, until - begin)
                ahead = _iterations_in(seconds, first_s, more_s)
            work.tokens += ahead * count
            work.decoding_s += seconds
            work.row_seconds += seconds * count
            if not ends:
                self._iterations += ahead
                break
            self.now = begin + seconds
            self._iterations = rows[0][0]
            self._end_rows()
        if self.now < until:
            self.now = until

    @property
    def _context(self) -> float:
        """The tokens of keys and values that an iteration reads."""
        count = len(self._rows)
        return (count if self.padded else 1) * self._offset + count * self._iterations

    def _end_rows(self) -> None:
        """Those that have their last token by now."""
        ended = 0
        for end, start, _, answers in self._rows:
            if end > self._iterations:
                break
            ended += 1
            self._offset -= answers.prompt_tokens - start
            answers.version_tokens += self._version * (end - start)
            if self._publishes and self._publishes[-1] > start:  # tokens before a publish are by a version earlier
                answers.version_tokens -= sum(at - start for at in self._publishes if at > start)
            answers.unfinished -= 1
            if not answers.unfinished:
                answers.ended_at = self.now
                self.done.append(answers)
        del self._rows[:ended]
        self.unfinished -= ended
        self._find_longest()
        if self._waiting:
            self._fill()

    def _fill(self) -> None:
        """Start rows that wait, as far as there are places."""
        now = self._iterations
        for _ in range(min(len(self._waiting), self.max_running - len(self._rows))):
            answers, length = self._waiting.popleft()
            if not answers.last_end:
                answers.oldest_version = self._version
            end = now + length
            if end > answers.last_end:
                answers.last_end = end
            self._started += 1
            self._rows.append((end, now, self._started, answers))
            self._offset += answers.prompt_tokens - now
        self._rows.sort()  # they are sorted but for the new ones
        self._find_longest()

    def _find_longest(self) -> None:
        if self.padded:
            self._offset = max((answers.prompt_tokens - start for _, start, _, answers in self._rows), default=0.0)


def _iterations_in(seconds: float, first_s: float, more_s: float) -> float:
    """i, where i iterations take first_s * i + more_s * i * i / 2 seconds."""
    if more_s * seconds < 1e-9 * first_s * first_s:
        return seconds / first_s
    return (math.sqrt(first_s * first_s + 2 * more_s * seconds) - first_s) / more_s
