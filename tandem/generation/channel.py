"""Pickled messages over a socket, where neither a stopped peer nor a broken one can block or confuse this side."""

import pickle
import select
import socket
import struct
from typing import Any

from tandem.errors import EngineError

_LENGTH = struct.Struct("!Q")
_LONGEST = 2**30
PROCESS_ENDED = "the process ended"


class ChannelClosed(EngineError):
    """The peer is gone, or what it sends is no message."""


class Channel:
    """One end. `send` never waits; what the peer has not taken yet goes out at the next `send` or `receive`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def sending(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        self._outgoing += _LENGTH.pack(len(data)) + data
        self._flush()

    def receive(self, timeout_s: float | None = 0.0) -> list[Any]:
        """Messages that have come, after waiting for the first one; None: as long as it takes."""
        select.select([self], [self] if self._outgoing else [], [], timeout_s)
        self._flush()
        try:
            while data := self._end.recv(1 << 20):
                self._incoming += data
        except BlockingIOError:
            return self._messages()
        except ConnectionError:
            pass
        last_words = self._messages()
        if not last_words:
            raise ChannelClosed(PROCESS_ENDED)
        return last_words

    def close(self) -> None:
        self._end.close()

    def _messages(self) -> list[Any]:
        found: list[Any] = []
        start = 0
        while len(self._incoming) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > _LONGEST:
                raise ChannelClosed("garbage instead of a message")
            stop = start + _LENGTH.size + length
            if len(self._incoming) < stop:
                break
            try:
                found.append(pickle.loads(self._incoming[start + _LENGTH.size : stop]))
            except Exception as error:  # noqa: BLE001 - bytes that are no pickle raise nearly anything
                raise ChannelClosed(f"garbage instead of a message: {error!r}") from None
            start = stop
        del self._incoming[:start]
        return found

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._end.send(self._outgoing)]
        except BlockingIOError:
            return
        except ConnectionError:
            self._outgoing.clear()  # `receive` tells
