"""Starts Python programs by forking, after it has imported what they import: `tests/programs.py` asks it to.

    python -m tests.program_server SOCKET       the descriptor of its end of a pair

To import torch, transformers and the package costs four CPU-seconds a program; a fork costs 20 ms. Programs are forked
while there is no thread. Each gets its own arguments, environment, working directory and files, and ends as any
interpreter does. The process from which a local cluster forks its ranks imports the same: it is forked beside it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from typing import Any

import numpy as np

_MESSAGE_BYTES, _FILES = 2**20, 16
_BEYOND = 200
"""Descriptors from here on are in nobody's way."""


def import_everything() -> None:
    """What `tandem train` has imported when its first step begins."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import tandem.cli
    import tandem.cluster.local
    import tandem.cluster.process
    import tandem.generation.native
    import tandem.jobs.evaluation
    import tandem.jobs.preference
    import tandem.jobs.rl
    import tandem.jobs.sft
    import tandem.training.fsdp  # noqa: F401


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a program for each request, and tell how each ended. Returns None when all is over; in every program that is
    forked, what it is asked to be, with its standard files."""
    running: dict[int, socket.socket] = {}
    ended, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _tell(running)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _FILES)
        if not message:
            return None
        caller = socket.socket(fileno=files.pop(0))
        child = os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (requests, caller, *running.values()):
                own.close()
            os.close(ended)
            os.close(woken)
            return {**json.loads(message), "files": files}
        caller.send(str(child).encode())
        running[child] = caller
        for file in files:
            os.close(file)


def _tell(running: dict[int, socket.socket]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with running.pop(child) as caller, suppress(OSError):  # nobody waits for it any more
            caller.send(str(status).encode())


def become(program: dict[str, Any]) -> None:
    """Take the program's place: session, directory, environment, standard files, and a fork server."""
    if program["new_session"]:
        os.setsid()
    os.chdir(program["directory"])
    process.ORIGINAL_DIR = program["directory"]  # where other processes look for the program's file
    os.environ.clear()
    os.environ.update(program["environment"])
    for number, file in enumerate(program["files"]):
        os.dup2(file, number)
        os.close(file)
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") or os.isatty(1) else -1
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, closefd=False)  # noqa: SIM115
    random.seed()
    np.random.seed()
    util.spawnv_passfds = _Spawner()  # type: ignore[attr-defined]


class _Spawner:
    """`multiprocessing.util.spawnv_passfds`, but that the fork server is a process that was forked while there was no
    thread; until then it waits to be told what to serve, and as long as the program lives. Forks of the program, which
    are not its parent, start one of their own."""

    def __init__(self) -> None:
        self._spawn = util.spawnv_passfds  # type: ignore[attr-defined]
        self._program = os.getpid()
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = os.fork()
        if not self._process:
            self._server.close()
            _wait_and_serve(theirs)
        theirs.close()

    def __call__(self, executable: bytes, arguments: Sequence[Any], files: Sequence[int]) -> int:
        code = arguments[-1]
        if self._process and "multiprocessing.forkserver" in code and os.getpid() == self._program:
            server, self._process = self._process, 0
            blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]
            message = {"code": code, "numbers": [*files], "blocked": blocked, "environment": dict(os.environ)}
            try:
                socket.send_fds(self._server, [json.dumps(message).encode()], files)
                return server
            except BrokenPipeError:  # it has died of a signal that was for all processes
                os.waitpid(server, 0)
        return self._spawn(executable, arguments, files)


def _wait_and_serve(requests: socket.socket) -> None:
    """Become multiprocessing's fork server, or end with the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as that does
    message, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _FILES)
    if not message:
        os._exit(0)
    told = json.loads(message)
    signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked"])
    os.environ.clear()
    os.environ.update(told["environment"])
    requests.close()
    beyond = [fcntl.fcntl(file, fcntl.F_DUPFD, _BEYOND) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(beyond, told["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    status = 1
    try:
        exec(told["code"], {"__name__": "__main__"})
    except SystemExit:  # as it ends when no program is left
        status = 0
    except BaseException:  # noqa: BLE001  whatever it is, a fork must not return
        traceback.print_exc()
    os._exit(status)


def run(words: Sequence[str]) -> None:
    """What `python WORDS` runs."""
    first, *rest = words
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [*words], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import_everything()
    gc.freeze()  # programs need not look through it
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        become(program)
        run(program["words"])
