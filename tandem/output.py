"""Standard output and error of a run, which may end before it does: a pipe is closed, a disk full, a terminal gone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


@contextmanager
def output_may_end() -> Iterator[None]:
    """Meanwhile what cannot be written there is lost, of which standard error is told once, and nothing is raised.

    A run's record is in its directory: nobody has to watch it.
    """
    before = sys.stdout
    sys.stdout = cast(TextIO, _Lasting.of(sys.stdout))
    try:
        with messages_may_end():
            yield
    finally:
        sys.stdout = before


@contextmanager
def messages_may_end() -> Iterator[None]:
    """The same for standard error alone, of which nobody is told."""
    before = sys.stderr
    sys.stderr = cast(TextIO, _Lasting.of(sys.stderr))
    try:
        yield
    finally:
        sys.stderr = before


def silence(stream: TextIO) -> None:
    """Let what is still to be written to a stream that has failed, as at the end of the process, go nowhere."""
    with suppress(OSError, ValueError):  # it is no file, or closed
        descriptor, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Lasting:
    """A stream whose failures change nothing. All else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    @classmethod
    def of(cls, stream: TextIO | None) -> "TextIO | _Lasting | None":
        """None: the process has none."""
        return stream if stream is None or isinstance(stream, cls) else cls(stream)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        silence(self._stream)
        if not self._lost and self is sys.stdout and sys.stderr is not None:
            reason = f"standard output cannot be written ({error.strerror}); the run goes on without it"
            print(reason, file=sys.stderr, flush=True)
        self._lost = True
