"""Connections of clients: how many there are, and for how long each may keep the server waiting.

    socket --Listener--> silent --a whole head--> asking --an answer--> idle --the next head--> asking …
                            '----------- the client is to do something, and does not ----------> cut

Whose turn it is: the client's, while it is to send a head, the rest of a body, or to take what was written; else the
server's. A client has the same time for each turn. Where places run out before, the connection goes that has sent no
request for longest, then the one that has kept the server waiting or was idle for longest. One that the server works
for never goes.

consumes:     connections to the listening socket
produces:     requests to the application, through uvicorn
waits for:    clients, each for a limited time; a free place; files, where the process has no more of them
unblocked by: what clients do; a look at all connections every second; time
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.serving.limits import DISCARDED_BODIES, ServerLimits

_BACKLOG = 2048
_AT_ONCE = 64
"""Connections that are taken before the event loop does other work."""
_RETRY_S = 0.2
"""Until connections are taken again, where there were no places or no files."""
_LOOK_S = 1.0
_LEAST_DUE_S = 1.0
"""Nobody who has sent a request goes for others before the server has waited for so long."""
_UNREAD_BYTES = 2**18
"""That the system holds for a client that does not read: else megabytes of answers are made for it."""
_MIB = 2**20


class Connection(H11Protocol):
    """uvicorn's connection, which knows whose turn it is."""

    def __init__(self, places: "Places", **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._places = places
        self._received, self._taken = 0, 0
        self._discarded, self._of = 0, None
        self._awaited: tuple[object, ...] | None = None
        self._since = self.loop.time()
        self.may_have_sent = False
        """The event loop has looked once whether it has sent something."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._places.holds(self):  # another one has taken its place meanwhile
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self.cycle is None:
            return
        self._places.has_asked(self)
        if self.cycle.response_complete and self.cycle.more_body:
            self._discard(len(data))

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started:  # it is too late for another answer
            self.end()
        else:
            super().send_400_response(msg)

    def resume_writing(self) -> None:
        self._taken += 1
        super().resume_writing()

    def end(self) -> None:
        """Cut it, whatever was not sent."""
        self._places.leave(self)
        if self.transport is not None:
            self.transport.abort()

    def _discard(self, count: int) -> None:
        """So many bytes came of a request that is answered, which nobody reads: a body that was refused is let in for a
        while, since many clients read no answer before they have sent all."""
        if self._of is not self.cycle:
            self._discarded, self._of = 0, self.cycle
        self._discarded += count
        if self._discarded > DISCARDED_BODIES * self._places.limits.body_bytes:
            self.end()

    def look(self, now: float) -> None:
        """Note since when the client is to do what it is to do."""
        awaited = self._awaits()
        if awaited is None or awaited != self._awaited:
            self._awaited, self._since = awaited, now

    def due_for(self, now: float) -> float:
        """For how long the server had been waiting for the client when it last looked; 0: it was not."""
        return 0.0 if self._awaited is None else now - self._since

    def is_overdue(self, now: float) -> bool:
        """The client has had its time. uvicorn ends what is idle."""
        awaited = self._awaited
        return (
            awaited is not None and awaited[0] != "idle" and self.due_for(now) >= self._places.limits.client_timeout_s
        )

    @property
    def asks_slowly(self) -> bool:
        """A part of a request is still to come."""
        awaited = self._awaits()
        return awaited is not None and awaited[0] in ("head", "body")

    def _awaits(self) -> tuple[object, ...] | None:
        """What the client is to do, equal as long as it does not; None: it is the server's turn."""
        cycle = self.cycle
        if self.transport is None:
            return ("head", None)
        is_answered = cycle is None or cycle.response_complete
        unread = self.transport.is_closing() or (is_answered and self.transport.get_write_buffer_size() > 0)
        if unread or self.flow.write_paused:
            return "take", self._taken
        if cycle is None or is_answered:
            return "idle" if self.timeout_keep_alive_task is not None else "head", cycle
        if cycle.more_body and not self.flow.read_paused:
            return "body", cycle, self._received // _MIB
        return None


class Places:
    """The connections of a server, as many as there may be."""

    def __init__(self, limits: ServerLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
        self._most, self._most_silent = limits.connections_here, limits.silent_connections
        self._loop = loop
        self._open: set[Connection] = set()
        self._silent: OrderedDict[Connection, None] = OrderedDict()
        """Those that have not sent a whole head yet, the oldest first."""
        self._look_s = min(_LOOK_S, limits.client_timeout_s / 4)
        self._looking = loop.call_later(self._look_s, self._look)

    def __len__(self) -> int:
        return len(self._open)

    def holds(self, connection: Connection) -> bool:
        return connection in self._open

    def has_room(self) -> bool:
        """One more may come, if need be for one that goes."""
        return not self._is_crowded or self._goes_next() is not None

    @property
    def will_have_room(self) -> bool:
        """Some that have just come may go when the event loop has looked at them."""
        return any(not connection.may_have_sent for connection in self._silent)

    def join(self, connection: Connection) -> None:
        """There has to be room. The connection that goes next makes it where all places are taken."""
        if self._is_crowded and (going := self._goes_next()) is not None:
            going.end()
        self._open.add(connection)
        self._silent[connection] = None

    @property
    def _is_crowded(self) -> bool:
        return len(self._open) >= self._most or len(self._silent) >= self._most_silent

    def has_asked(self, connection: Connection) -> None:
        self._silent.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._silent.pop(connection, None)

    def end_slow(self) -> None:
        """Cut those whose requests have not come whole."""
        for connection in list(self._open):
            if connection.asks_slowly:
                connection.end()

    def end_all(self) -> None:
        for connection in list(self._open):
            connection.end()

    def close(self) -> None:
        self._looking.cancel()
        self.end_all()

    def _goes_next(self) -> Connection | None:
        silent = next(iter(self._silent), None)
        if silent is not None and silent.may_have_sent:
            return silent
        if len(self._silent) >= self._most_silent:
            return None
        now = self._loop.time()
        while longest := max(self._open, key=lambda connection: connection.due_for(now), default=None):
            if longest.due_for(now) < _LEAST_DUE_S:
                return None
            longest.look(now)  # it may have done since what it was to do
            if longest.due_for(now) >= _LEAST_DUE_S:
                return longest
        return None

    def _look(self) -> None:
        now = self._loop.time()
        for connection in list(self._open):
            connection.look(now)
            if connection.is_overdue(now):
                connection.end()
        self._looking = self._loop.call_later(self._look_s, self._look)


class Listener:
    """Takes connections as long as there are places. No error of one ends it, nor that there are no more files."""

    def __init__(
        self,
        listening: socket.socket,
        places: Places,
        make: Callable[[], Connection],
        complain: Callable[[OSError], None],
    ) -> None:
        """`complain` is told why no connection can be taken for a while."""
        self._listening = listening
        self._places = places
        self._make = make
        self._complain = complain
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        self._open()

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._listening)
        if self._waiting is not None:
            self._waiting.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _open(self) -> None:
        self._loop.add_reader(self._listening, self._take)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listening)
        self._waiting = self._loop.call_later(_RETRY_S, self._open)

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._places.has_room():
                if not self._places.will_have_room:
                    self._pause()
                return
            try:
                end, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # there are no more files, or no memory: others have to end first
                self._complain(error)
                self._pause()
                return
            connection = self._make()
            self._places.join(connection)
            beginning = self._loop.create_task(self._begin(end, connection))
            self._beginning.add(beginning)
            beginning.add_done_callback(self._beginning.discard)

    async def _begin(self, end: socket.socket, connection: Connection) -> None:
        try:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
            await self._loop.connect_accepted_socket(lambda: connection, end)
            for _ in range(2):
                await asyncio.sleep(0)
            connection.may_have_sent = True
        except (OSError, asyncio.CancelledError):  # the client has left already, or the server ends
            self._places.leave(connection)
            end.close()
