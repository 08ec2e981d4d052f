"""The HTTP server under the endpoint: its socket, its life, its end."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from tandem.errors import UserError
from tandem.serving.complaints import Complaints, seldom_repeated
from tandem.serving.connections import Connection, Listener, Places
from tandem.serving.limits import HEAD_BYTES, USUAL, ServerLimits
from tandem.signals import heeded

_GRACE_S = 2
"""After a signal, for clients to take what was answered; connections that are still open then are cut."""
_AFTER_GRACE_S = 2
"""Then for what was made for them to end."""


def reserve(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address, so that nobody else gets it, and does not listen yet.

    Raises UserError where there is no such address, or somebody has it.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host}: no address of this machine ({error})") from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        mend = "give --port another number, or 0 for any free one"
        raise UserError(f"--port {port}: {host} cannot be listened on there ({error.strerror}); {mend}") from None
    return reserved


class Server(uvicorn.Server):
    """Answers on a reserved socket until `stop`, which Ctrl-C and SIGTERM call."""

    def __init__(
        self,
        app: ASGIApp,
        reserved: socket.socket,
        *,
        limits: ServerLimits = USUAL,
        on_start: Callable[[str], None] = lambda url: None,
        on_stop: Callable[[], None] = lambda: None,
        takes_signals: bool = True,
        keep_alive_s: int = 5,
    ) -> None:
        """`on_start` gets the base URL once connections are taken; `on_stop` makes answers under way end soon.
        `keep_alive_s`: how long a connection may be idle."""
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S + _AFTER_GRACE_S,
                timeout_keep_alive=keep_alive_s,
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        self._reserved = reserved
        self._limits = limits
        self._on_start = on_start
        self._on_stop = on_stop
        self._takes_signals = takes_signals
        self._complaints = Complaints()
        self._places: Places | None = None
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)

    async def run_until_stopped(self) -> None:
        with seldom_repeated(self._complaints):
            await self.serve(sockets=[self._reserved])

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Take no more requests, and end when those under way are answered. After a second Ctrl-C: at once."""
        if self.should_exit:
            self.force_exit = by == signal.SIGINT
            return
        self.should_exit = True
        self._on_stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._places = places = Places(self._limits, asyncio.get_running_loop())
        listener = Listener(self._reserved, places, partial(self._connection, places), self._complain)
        self.servers = [cast(asyncio.Server, listener)]
        self.started = True
        host, port = self._reserved.getsockname()[:2]
        self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Clients that are answered have a while to take it; whoever has not asked yet, or does not read, is cut."""
        assert self._places is not None
        self._places.end_slow()
        cutting = asyncio.get_running_loop().call_later(_GRACE_S, self._places.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            self._places.close()

    def _connection(self, places: Places) -> Connection:
        return Connection(
            places,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )

    def _complain(self, error: OSError) -> None:
        behind = self._complaints.note(error.errno)
        if behind is not None:
            problem = f"no connection can be taken now ({error.strerror}); those that are there go on"
            print(f"tandem: {problem}{behind}", file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let signals that ask for it call `stop`. uvicorn would raise them again at the end: this is no failure."""
        if not self._takes_signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = heeded()
        for number in numbers:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Answers that are cut at the end are no fault to be logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
