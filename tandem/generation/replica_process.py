"""The process of a replica: an engine that is stepped, and the channel to the process that asks it.

    python -m tandem.generation.replica_process FD      (started by replica.py; the first message says what to make)

consumes:     (add | abort | call | ping) messages, between two steps of the engine
produces:     completions and deltas, answers to calls, signs of life
waits for:    messages, when there is nothing to generate or the weights are incomplete
unblocked by: its parent, also by the parent's death
"""

import importlib
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from tandem.errors import EngineError, TandemError, UserError
from tandem.generation.channel import Channel, ChannelClosed
from tandem.signals import leave_stopping_to_the_controller
from tandem.types import Completion, Delta, Request
from tandem.weights.base import Commit, Part


class SteppedEngine(Protocol):
    """An engine that does nothing by itself. Samples go by numbers that the caller chooses."""

    max_tokens: int
    """Positions of a row: prompt and response together."""
    vocabulary: int
    max_running: int
    """Samples that it generates at once; further ones wait in it."""

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        """Continue `request` with `seeds[sample]` from the next step on. Raises ValueError when it cannot.

        A streamed sample comes as a Delta of each step that gives it tokens, another one as one Completion at its end.
        """
        ...

    def step(self) -> list[tuple[int, Completion | Delta]]:
        """Advance what runs; the samples that ended, and the new tokens of streamed ones."""
        ...

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion | Delta]]:
        """End samples early: what they have so far, for a streamed one what is new, with status `aborted`.

        What came of other samples meanwhile may be among it, and comes nowhere else then.
        """
        ...

    def load(self, part: Part) -> None:
        """Take a part of new weights; between the first and Commit there is no step, and weights may be mixed."""
        ...

    def sleep(self, weights: bool) -> None:
        """Give memory back: that of the KV cache, and with `weights` theirs, which a publish then has to fill."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...


class _ReplicaLoop:
    """Takes messages and steps the engine, in turn."""

    def __init__(self, channel: Channel, engine: SteppedEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._running: set[int] = set()
        self._loading = False

    def run(self, messages: Sequence[Any]) -> None:
        """`messages`: those that came while the engine was made."""
        while True:
            for verb, *arguments in messages:
                getattr(self, verb)(*arguments)
            if self._busy:
                self._report(self._engine.step())
            messages = self._channel.receive(0.0 if self._busy else None)

    @property
    def _busy(self) -> bool:
        return bool(self._running) and not self._loading

    def add(self, numbers: Sequence[int], request: Request, samples: Sequence[int], streamed: bool) -> None:
        for number, sample in zip(numbers, samples, strict=True):
            try:
                self._engine.add(number, request, sample, streamed)
                self._running.add(number)
            except Exception as error:  # noqa: BLE001 - the caller raises it
                self._channel.send(("refused", number, _refusal(error)))

    def abort(self, numbers: Sequence[int]) -> None:
        self._report(self._engine.abort(numbers))

    def ping(self) -> None:
        self._channel.send(("pong",))

    def call(self, number: int, method: str, *arguments: Any) -> None:
        if method == "load":
            self._loading = not isinstance(arguments[0], Commit)
        getattr(self._engine, method)(*arguments)
        self._channel.send(("answer", number))

    def _report(self, outputs: list[tuple[int, Completion | Delta]]) -> None:
        if outputs:
            self._running.difference_update(number for number, output in outputs if output.status is not None)
            self._channel.send(("outputs", outputs))


def _refusal(error: Exception) -> TandemError:
    """An engine raises ValueError on what it cannot be asked for; anything else is its own failure."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ValueError):
        return UserError(f"generate: the engine refuses the request: {error}")
    return EngineError(f"generate: the engine failed on a request:\n{''.join(traceback.format_exception(error))}")


def main(file: int) -> None:
    leave_stopping_to_the_controller()
    channel = Channel(socket.socket(fileno=file))
    try:
        (module, function, arguments), *others = channel.receive(None)
        engine = getattr(importlib.import_module(module), function)(*arguments)
        channel.send(("ready", engine.max_tokens, engine.vocabulary, engine.max_running))
        _ReplicaLoop(channel, engine).run(others)
    except ChannelClosed:
        return  # the parent is gone
    except UserError as error:
        channel.send(("failed", error))
    except Exception:  # noqa: BLE001 - the parent raises it
        channel.send(("failed", traceback.format_exc()))
    while channel.sending:
        channel.receive(1.0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
