"""Functions that block, beside an event loop."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from tandem.rollout.environment import EnvironmentFailed

_MOST_LEFT_BEHIND = 1000
_left_behind: set[threading.Thread] = set()
"""Those whose function nobody waits for any more; some may have ended since."""


async def in_thread(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """What the function returns or raises, from a daemon thread of its own. What it raises that is no Exception, such
    as SystemExit, comes out as one: here it would end the event loop.

    Pools of threads would wait, at the end of the process, for a function that hangs; this thread is left behind.
    Raises EnvironmentFailed where too many are: no machine has room for any number of them.
    """
    _check_left_behind(function)
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[tuple[Any, Exception | None]] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append((context.run(function, *arguments, **named), None))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            outcome.append((None, error))
        except BaseException as error:  # noqa: BLE001
            outcome.append((None, as_exception(error)))
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=work, daemon=True, name="environment")
    thread.start()
    try:
        await done.wait()
    finally:
        if not done.is_set():
            _left_behind.add(thread)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def as_exception(error: BaseException) -> Exception:
    """The error, or one that tells of it."""
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"it raised {error!r}")
    told.__cause__ = error
    return told


def _check_left_behind(function: Callable[..., Any]) -> None:
    if len(_left_behind) < _MOST_LEFT_BEHIND:
        return
    _left_behind.intersection_update([thread for thread in _left_behind if thread.is_alive()])
    if len(_left_behind) >= _MOST_LEFT_BEHIND:
        raise EnvironmentFailed(
            f"{_MOST_LEFT_BEHIND:,} calls of functions hang in threads, which cannot be ended; give what "
            f"{getattr(function, '__name__', function)} waits for a limit of its own, or make it async"
        )
