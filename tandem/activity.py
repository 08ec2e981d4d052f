"""What a run is doing at this moment: its stages say it here, and a display, if there is one, shows it.

One process has one run under way, and one thread that says what it does; another may read it at any time.
"""

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Activity:
    """A stage, and how much of it is done where somebody counts."""

    stage: str
    since: float
    """When it began, as `time.monotonic` has it."""
    done: int = 0
    """0 also where nobody counts."""
    total: int = 0
    unit: str = ""
    note: str = ""
    """What else there is to say of those that are done: ", 3 timed out"."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer, for a person to look at."""

    prompt: str
    answer: str
    reward: float | None


_activity = Activity("", 0.0)
_answer: Shown | None = None


def begin(stage: str, total: int = 0, unit: str = "") -> None:
    """A stage begins, and whatever was done before is over."""
    global _activity
    _activity = Activity(stage, time.monotonic(), total=total, unit=unit)


def expect(total: int, unit: str) -> None:
    """Of the stage under way so much is to be done, and nothing of it is done yet."""
    global _activity
    _activity = replace(_activity, done=0, total=total, unit=unit, note="")


def count(done: int, note: str = "") -> None:
    """So much of the stage is done."""
    global _activity
    _activity = replace(_activity, done=done, note=note)


def show(answer: Shown | None) -> None:
    """The answer to look at from now on."""
    global _answer
    _answer = answer


def current() -> tuple[Activity, Shown | None]:
    """What is done now, and the answer that was shown last."""
    return _activity, _answer
