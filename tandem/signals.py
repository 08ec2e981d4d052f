"""Ctrl-C, SIGTERM, SIGHUP: the controller finishes its step and saves; the other processes of a run leave it to it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a run to stop: Ctrl-C, what Slurm and Kubernetes send before they kill, and the end of a terminal."""


REWARDS_S = 5.0
"""So long a run that is to stop waits for rewards, where nothing else lacks; then it gives up the step."""
StopReason = signal.Signals | str
"""What asked a run to stop: a signal, or a callback, in words of its own."""


def heeded() -> tuple[signal.Signals, ...]:
    """Those of `STOP` that this process heeds: SIGHUP is ignored where `nohup` has started it, and stays so."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP if number != signal.SIGHUP or not ignored)


def in_words(reason: StopReason) -> str:
    return reason.name if isinstance(reason, signal.Signals) else reason


@dataclass(slots=True)
class StopRequest:
    """Whether a signal or a callback has asked the run to stop after the step in hand."""

    by: StopReason | None = None
    """The first that did."""
    at: float = 0.0
    """When that was, as `time.monotonic` has it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile the signals of `STOP` ask. A second Ctrl-C raises KeyboardInterrupt; a second one of the others,
        which some senders repeat at once, changes nothing. In another thread than the main one, which gets no signals,
        none asks.
        """
        global _listening
        _listening = self
        signals = heeded() if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._ask) for number in signals}
        try:
            yield
        finally:
            _listening = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        """Have the run stop for this reason, unless it is to stop already."""
        if self.by is None:
            self.by, self.at = reason, time.monotonic()
            print(f"{reason}: stopping after this step", flush=True)

    def _ask(self, number: int, frame: object) -> None:
        if self.by is None:
            self.by, self.at = signal.Signals(number), time.monotonic()
            again = " (Ctrl-C again: at once, back to the last checkpoint)" if self.by is signal.SIGINT else ""
            with suppress(OSError):  # print is not safe here: the signal may have interrupted another print
                os.write(1, f"\n{self.by.name}: stopping after this step{again}\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


_listening: StopRequest | None = None
"""That of the run of this process, while it listens."""


def waits_in_vain(since: float) -> bool:
    """Whether the run of this process was asked to stop, and has waited for rewards alone, `since` this moment of
    `time.monotonic`, for `REWARDS_S` after that."""
    stop = _listening
    return stop is not None and stop.by is not None and time.monotonic() - max(since, stop.at) > REWARDS_S


def leave_stopping_to_the_controller() -> None:
    """Make this process, which a controller started and will end, go on when it gets a signal of `STOP`.

    Schedulers may send SIGTERM to every process of a job at once, and a worker that died of it would cost the step that
    the controller wants to finish. Programs that this process starts have the signals' usual meaning: a handler, other
    than SIG_IGN, ends with exec. Only in the main thread.
    """
    for number in heeded():
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # system calls go on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Meanwhile the signals of `STOP` wait; a program that is started goes on blocking them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
