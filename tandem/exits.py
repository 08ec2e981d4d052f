"""`os._exit` in the user's code, which ends the process that a run computes in, and says nothing.

Within `no_exit` it raises ProcessExit instead, which is told as whatever else that code raises. Elsewhere in a process
that has been there, as in threads that the user's code has started, the process ends, but it is told who did that.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn

_end_process = os._exit
_guarded_in: ContextVar[int] = ContextVar("guarded_in", default=0)
"""The process in which `no_exit` is around the code that runs: one that it forks is its own matter."""
_process = 0
"""Where `os._exit` was replaced."""


class ProcessExit(RuntimeError):
    """The user's code has called `os._exit`; the message holds the function, its file and the status."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Around the user's code: its `os._exit` raises ProcessExit."""
    global _process
    _process, os._exit = os.getpid(), _exit
    before = _guarded_in.set(_process)
    try:
        yield
    finally:
        _guarded_in.reset(before)


def _exit(status: int) -> NoReturn:
    if os.getpid() != _process:
        _end_process(status)
    told = f"{_place(sys._getframe(1))} called os._exit({status})"
    if _guarded_in.get() == _process:
        raise ProcessExit(f"{told}: that would end the process of the run, so it is an error here; return, or raise")
    if not _is_pythons_own(sys._getframe(1).f_code.co_filename):
        print(f"{told}: this process ends", file=sys.stderr, flush=True)
    _end_process(status)


def _is_pythons_own(file: str) -> bool:
    """multiprocessing ends its processes so."""
    library = os.path.dirname(os.__file__)
    return file.startswith(("<frozen ", library)) and not file.startswith(os.path.join(library, "site-packages"))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"
