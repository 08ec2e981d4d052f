"""The user's own functions, async or plain: whatever they raise ends neither the event loop nor the run."""

import asyncio
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from tandem.exits import no_exit
from tandem.rollout.threads import as_exception, in_thread


async def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """What it returns; a plain one runs in a thread. Raises an Exception, whatever it raises."""
    with exceptions_only():
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await function(*arguments, **named)
        result = await in_thread(function, *arguments, **named)
        return await result if inspect.isawaitable(result) else result


@contextmanager
def exceptions_only() -> Generator[None]:
    """Around the user's code: what is raised in it and is no Exception comes out as one, such as SystemExit,
    with which a command line's `main` ends, and so does `os._exit`. Ctrl-C stays what it is, and so does the
    cancelling of this task."""
    try:
        with no_exit():
            yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_exception(error) from error
    except BaseException as error:
        raise as_exception(error) from error
