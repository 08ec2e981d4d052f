"""What runs in a reward worker: chunks of calls in, results out.

consumes   a list of references, then chunks: list[(position, Call)]
produces   list[Result], at the end of a chunk and whenever FLUSH_S have passed; meanwhile the Board tells which
           call runs since when, so that the parent can tell a call that hangs or kills the process
waits for  the next chunk; ends at end of file, or with its parent
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import pickle
import random
import signal
import struct
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tandem.errors import UserError
from tandem.reward.functions import Kind, RewardFunction, load
from tandem.reward.verdicts import Verdict, failed, read

FLUSH_S = 0.02
_PR_SET_PDEATHSIG = 1


class Call(NamedTuple):
    """One call of a reward function. Rows are pickled one by one, so that no call shares an object with another."""

    reference: str
    """Of the function; one that the pool was started with."""
    seed: int
    """Of `random` and `numpy.random`; below 2 ** 32."""
    places: tuple[str, ...]
    """Of each row, for messages: `row 12, sample 3`."""
    rows: tuple[bytes, ...]
    """The pickled arguments of each trajectory: one, or the siblings that a TRL function judges together."""


class Result(NamedTuple):
    position: int
    """Of the call in its run."""
    verdicts: list[Verdict]
    """One a row of the call."""
    seconds: float


class Board:
    """Memory that a worker shares with its parent: the call that began last, and when, by the monotonic clock."""

    SIZE = mmap.PAGESIZE
    _LAYOUT = struct.Struct("=qd")

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.SIZE)

    def write(self, position: int, started: float) -> None:
        """Position -1: no call of the chunk has begun; start 0: it has ended."""
        self._LAYOUT.pack_into(self._memory, 0, position, started)

    def read(self) -> tuple[int, float]:
        """Not atomic: believe what two looks agree on."""
        return self._LAYOUT.unpack_from(self._memory)


def main() -> None:
    socket, memory, parent = (int(argument) for argument in sys.argv[1:4])
    _die_with(parent)
    for descriptor in (socket, memory):
        os.set_inheritable(descriptor, False)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    connection, board = Connection(socket), Board(memory)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        functions = {reference: _load(reference) for reference in connection.recv()}
        while True:
            _serve(connection.recv(), functions, board, connection)


def _die_with(parent: int) -> None:
    """Even while user code runs; end of file on the socket covers what this does not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def _load(reference: str) -> RewardFunction | UserError:
    """The parent has loaded it before; when the file has changed since, each call fails with the reason."""
    try:
        return load(reference)
    except UserError as error:
        return error


def _serve(
    chunk: list[tuple[int, Call]],
    functions: dict[str, RewardFunction | UserError],
    board: Board,
    connection: Connection[Any, Any],
) -> None:
    results: list[Result] = []
    process, flushed = os.getpid(), time.monotonic()
    for position, call in chunk:
        started = time.monotonic()
        board.write(position, started)
        verdicts = execute(functions[call.reference], call)
        if os.getpid() != process:  # user code has forked, and the child came back here
            os._exit(1)
        board.write(position, 0.0)
        now = time.monotonic()
        results.append(Result(position, verdicts, now - started))
        if now - flushed > FLUSH_S:
            connection.send(results)
            results, flushed = [], now
    if results:
        connection.send(results)


def execute(function: RewardFunction | UserError, call: Call) -> list[Verdict]:
    """One verdict a row. Raises nothing: whatever goes wrong is the verdict."""
    try:
        if isinstance(function, UserError):
            raise function
        _seed(call.seed)
        return read(function, call.places, _call(function, call.rows))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        return [failed(call.reference, place, error) for place in call.places]


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _call(function: RewardFunction, pickled: tuple[bytes, ...]) -> Any:
    rows = [pickle.loads(row) for row in pickled]
    arguments = {name: [row[name] for row in rows] for name in rows[0]} if function.kind is Kind.TRL else rows[0]
    result = function.call(**arguments)
    return asyncio.run(_wait_for(result)) if isinstance(result, Awaitable) else result


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result
