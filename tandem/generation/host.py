"""The process of a replica: an engine that is stepped, and the channel to the process that asks it.

    python -m tandem.generation.host FD      (made by replicas.py; the first message says what to make)

consumes:     (ask | drop | abort | call | ping) messages, between two steps of the engine
produces:     completions, answers to calls, signs of life
waits for:    messages, when there is nothing to generate or the weights are incomplete
unblocked by: its parent, also by the parent's death
"""

import importlib
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from tandem.errors import UserError
from tandem.generation.channel import Channel, ChannelClosed
from tandem.signals import leave_stopping_to_the_controller
from tandem.types import Completion, Request
from tandem.weights.base import Commit, Part


class SteppedEngine(Protocol):
    """An engine that does nothing by itself. Samples go by numbers that the caller chooses."""

    max_tokens: int
    """Positions of a row: prompt and response together."""
    vocabulary: int

    def add(self, number: int, request: Request, sample: int) -> None:
        """Continue `request` with `seeds[sample]` from the next step on."""
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """Advance what runs; the samples that ended."""
        ...

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion]]:
        """End samples early: what they have so far, status `aborted`."""
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


class _Host:
    def __init__(self, channel: Channel, engine: SteppedEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._open: set[int] = set()
        self._loading = False

    def run(self) -> None:
        while True:
            for verb, *arguments in self._channel.receive(0.0 if self._busy else None):
                getattr(self, verb)(*arguments)
            if self._busy:
                self._finish(self._engine.step())

    @property
    def _busy(self) -> bool:
        return bool(self._open) and not self._loading

    def ask(self, numbers: Sequence[int], request: Request, samples: Sequence[int]) -> None:
        for number, sample in zip(numbers, samples, strict=True):
            try:
                self._engine.add(number, request, sample)
                self._open.add(number)
            except Exception:  # noqa: BLE001 - the caller raises it
                self._channel.send(("refused", number, traceback.format_exc()))

    def drop(self, numbers: Sequence[int]) -> None:
        self._open.difference_update(number for number, _ in self._engine.abort(numbers))

    def abort(self, numbers: Sequence[int]) -> None:
        self._finish(self._engine.abort(numbers))

    def ping(self) -> None:
        self._channel.send(("pong",))

    def call(self, number: int, method: str, *arguments: Any) -> None:
        if method == "load":
            self._loading = not isinstance(arguments[0], Commit)
        getattr(self._engine, method)(*arguments)
        self._channel.send(("answer", number))

    def _finish(self, ended: list[tuple[int, Completion]]) -> None:
        if ended:
            self._open.difference_update(number for number, _ in ended)
            self._channel.send(("done", ended))


def main(file: int) -> None:
    leave_stopping_to_the_controller()
    channel = Channel(socket.socket(fileno=file))
    try:
        module, function, arguments = channel.receive(None)[0]
        engine = getattr(importlib.import_module(module), function)(*arguments)
        channel.send(("ready", engine.max_tokens, engine.vocabulary))
        _Host(channel, engine).run()
    except ChannelClosed:
        return  # the parent is gone
    except UserError as error:
        channel.send(("failed", error))
    except Exception:  # noqa: BLE001 - the parent tells it
        channel.send(("failed", traceback.format_exc()))
    while channel.sending:
        channel.receive(1.0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
