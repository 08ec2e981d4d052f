"""What worker processes print goes to the controller's output, each line with the name of its process in front."""

import os
import selectors
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from threading import Event

_LAST_LINES = 20


class Output:
    """Standard output and error of one process, from these pipes."""

    def __init__(self, name: str, *pipes: Connection) -> None:
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.ended = Event()
        """No more will come."""
        self._name = name
        self._pipes = pipes
        self._unfinished = [b""] * len(pipes)

    def register(self, selector: selectors.BaseSelector) -> None:
        for number, pipe in enumerate(self._pipes):
            selector.register(pipe, selectors.EVENT_READ, (self, number))

    def forward(self, number: int) -> bool:
        """Print the lines that came on pipe `number`; False at its end."""
        data = os.read(self._pipes[number].fileno(), 1 << 16)
        *complete, self._unfinished[number] = (self._unfinished[number] + data).split(b"\n")
        if not data:
            self._pipes[number].close()
            complete = [self._unfinished[number]] if self._unfinished[number] else []
        lines = [line.decode(errors="replace") for line in complete]
        self.last.extend(lines)
        text = "".join(f"({self._name}) {line}\n" for line in lines)
        print(text, end="", file=(sys.stdout, sys.stderr)[number], flush=True)
        if all(pipe.closed for pipe in self._pipes):
            self.ended.set()
        return bool(data)


def forward(outputs: Sequence[Output]) -> None:
    """Until all have ended: the main function of a thread."""
    with selectors.DefaultSelector() as selector:
        for output in outputs:
            output.register(selector)
        while selector.get_map():
            for key, _ in selector.select():
                output, number = key.data
                if not output.forward(number):
                    selector.unregister(key.fd)
