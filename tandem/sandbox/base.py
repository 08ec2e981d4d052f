"""What a sandbox is: a program and its input in, an ExecutionResult out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """What one run may use, its children included."""

    timeout_s: float = 25.0
    """Wall-clock; each process also gets no more CPU time than this, rounded up to seconds."""
    memory_mib: int = 1024
    """The address space of each process, and the resident memory of all of them."""
    processes: int = 32
    """Threads count."""
    file_mib: int = 16
    """Largest file, standard output and error included."""
    scratch_mib: int = 64
    """The size of /tmp, the one writable place; it is memory and vanishes with the run."""


@dataclass(frozen=True)
class ExecutionResult:
    """How a program ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    stopped: str | None = None
    """The limit of the whole run that it was killed for; None when it ended by itself."""


class Sandbox(Protocol):
    """Runs Python programs that nobody has read. Raises TandemError when the sandbox itself fails; safe in threads."""

    @property
    def limits(self) -> Limits: ...

    @property
    def modules(self) -> Sequence[str]:
        """What programs can import besides the standard library, as far as it is known."""
        ...

    def run(self, program: str, stdin: str = "", timeout_s: float = math.inf) -> ExecutionResult:
        """Run `program`, for no longer than `timeout_s` and the limits allow.

        Returns when it and every process that it started are gone.
        """
        ...
