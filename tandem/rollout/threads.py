"""Functions that block, beside an event loop."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the function returns or raises, from a daemon thread of its own.

    Pools of threads would wait, at the end of the process, for a function that hangs; this thread is left behind.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append((context.run(function, *arguments, **named), None))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome.append((None, error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, daemon=True, name="environment").start()
    await done.wait()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
