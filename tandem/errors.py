"""The exception tree: what the user can mend, and what a run cannot survive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.types import Group


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line ends and tabs; what turns the direction of letters; halves of surrogate pairs."""


def for_terminal(text: str) -> str:
    """What data, models and users' code say, with control characters spelled out: they do nothing to a terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def with_notes(error: TandemError) -> str:
    """The message, and the lines of its notes, as in which optimizer step a worker raised it; for a terminal."""
    return for_terminal("\n".join([str(error), *getattr(error, "__notes__", [])]))


class UserError(TandemError, ValueError):
    """The user's mistake: the message names the place, the value, the reason and the mend (exit status 2)."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, as the command line does."""
        return [f"{type(self).__name__}: {self}"]


class RewardShareExceeded(TandemError, RuntimeError):
    """More trajectories lost their reward to errors and time-outs than `reward.max_error_share` allows."""

    def __init__(self, message: str, groups: Sequence[Group]) -> None:
        super().__init__(message)
        self.groups = groups
        """All that were scored together, those with a reward included."""


class NoRoomToAnswer(TandemError, RuntimeError):
    """Every conversation of a run opened with as many tokens as the engine takes, or more: the message names one."""


class StepGivenUp(TandemError):
    """The run was asked to stop, and waited in vain for rewards of the step in hand, which is not trained."""


class CallbackFailed(TandemError, RuntimeError):
    """A callback of the user's raised: the message holds its name, the step, and the user's part of the traceback."""


class EngineError(TandemError, RuntimeError):
    """A training or generation engine broke its contract (wrong version, wrong numbers, dead process)."""


class WorkerError(TandemError, RuntimeError):
    """A worker raised: the message holds its role, rank and host, and its own traceback."""


class WorkerLost(TandemError, RuntimeError):
    """A worker's process died or stopped answering; a run may be continued from its last checkpoint."""

    trainer_is_whole = False
    """The models in training stand where the last step has left them, as far as their processes live."""
