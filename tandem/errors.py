"""The exception tree: what the user can mend, and what a run cannot survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.types import Group


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


def with_notes(error: TandemError) -> str:
    """The message, and the lines of its notes: as in which optimizer step a worker raised it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


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


class CallbackFailed(TandemError, RuntimeError):
    """A callback of the user's raised: the message holds its name, the step, and the user's part of the traceback."""


class EngineError(TandemError, RuntimeError):
    """A training or generation engine broke its contract (wrong version, wrong numbers, dead process)."""


class WorkerError(TandemError, RuntimeError):
    """A worker raised: the message holds its role, rank and host, and its own traceback."""


class WorkerLost(TandemError, RuntimeError):
    """A worker's process died or stopped answering; a run may be continued from its last checkpoint."""
