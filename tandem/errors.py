"""The exception tree: what the user can mend, and what a run cannot survive."""


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class UserError(TandemError, ValueError):
    """The user's mistake: the message names the place, the value, the reason and the mend (exit status 2)."""


class RewardShareExceeded(TandemError, RuntimeError):
    """More trajectories lost their reward to errors and time-outs than `reward.max_error_share` allows."""


class EngineError(TandemError, RuntimeError):
    """A training or generation engine broke its contract (wrong version, wrong numbers, dead process)."""


class WorkerError(TandemError, RuntimeError):
    """A worker raised: the message holds its role, rank and host, and its own traceback."""


class WorkerLost(TandemError, RuntimeError):
    """A worker's process died or stopped answering; a run may be continued from its last checkpoint."""
