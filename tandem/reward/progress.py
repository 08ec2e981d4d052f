"""How far the scoring of many answers is: in the status line, and where it takes long in a line a minute."""

import time
from collections import Counter
from collections.abc import Iterable

from tandem.activity import count, current, expect
from tandem.types import Group, Status

UNDER_WAY = "not scored yet"
"""The `error` of a score that stands for one which may still come."""
_LOOK_S = 0.5
_LINE_S = 60.0


class ScoringProgress:
    """Of the answers that one wait is for."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = time.monotonic()
        self._next_look, self._next_line = self._began + _LOOK_S, self._began + _LINE_S
        expect(total, "answers")

    def is_due(self) -> bool:
        """Whether enough time has passed since `tell`."""
        return time.monotonic() >= self._next_look

    def tell(self, groups: Iterable[Group]) -> None:
        """What is known of the groups now."""
        now = time.monotonic()
        self._next_look = now + _LOOK_S
        scores = [score for group in groups for score in group.scores]
        failures = Counter(score.failure for score in scores if score.error != UNDER_WAY)
        lost = {"timed out": failures[Status.REWARD_TIMEOUT], "failed": failures[Status.REWARD_ERROR]}
        note = "".join(f", {number:,} {how}" for how, number in lost.items() if number)
        scored = failures.total()
        count(scored, note)
        if now >= self._next_line:
            self._next_line = now + _LINE_S
            stage = current()[0].stage or "rewards"
            passed = f"{now - self._began:.0f} s"
            print(f"{stage}: {scored:,} of {self._total:,} answers are through{note}, after {passed}", flush=True)
