"""Python programs of tests, started as forks of one process that has imported everything (`program_server.py`).

For programs that import torch or the package's jobs, where what is tested is not that they are imported, nor how an
interpreter starts: options of the interpreter itself are refused, and what it reads from the environment when it starts
(the seed of hashes, threads, offline flags of libraries) is the server's. One server serves all tests of a process.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

PYTHON = sys.executable
TANDEM = str(Path(sys.executable).with_name("tandem"))


class Program(subprocess.Popen[Any]):
    """`subprocess.Popen([PYTHON, …])` or `([TANDEM, …])`; of its options those for directory, environment, session and
    standard files. Its end is known by the server, whose child it is."""

    def _execute_child(self, args: Sequence[Any], *others: Any) -> None:
        directory, environment, new_session = others[4], others[5], others[20]
        pipes = others[9:15]  # of standard input the child's end and ours; of output and of error ours and the child's
        assert others[1] is None and not others[3], "a program has no preexec_fn and no pass_fds"
        program, *words = map(os.fspath, args)
        assert program in (PYTHON, TANDEM) and (program == TANDEM or words[0] in "-c -m" or words[0][0] != "-"), args
        message = {
            "words": words if program == PYTHON else ["-m", "tandem", *words],
            "directory": os.fspath(directory or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "new_session": bool(new_session),
        }
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        children = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        with theirs:
            socket.send_fds(_server()[0], [json.dumps(message).encode()], [theirs.fileno(), *children])
        self.pid = int(self._told.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            status = self._told.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        assert status, "the server of programs has ended"
        self._told.close()
        return self.pid, int(status)

    def _internal_poll(self, _deadstate: int | None = None, **others: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                process, status = self._try_wait(os.WNOHANG)
                if process:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, of a `Program`."""
    timeout, check, given = options.pop("timeout", None), options.pop("check", False), options.pop("input", None)
    if options.pop("capture_output", False):
        options["stdout"] = options["stderr"] = subprocess.PIPE
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with Program(command, **options) as program:
        try:
            out, err = program.communicate(given, timeout=timeout)
        except BaseException:
            program.kill()
            raise
    ended = subprocess.CompletedProcess(program.args, program.returncode, out, err)
    if check:
        ended.check_returncode()
    return ended


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Where it is asked, and itself, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.set_inheritable(False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with theirs:
        server = subprocess.Popen(
            [PYTHON, "-m", "tests.program_server", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    atexit.register(ours.close)
    return ours, server
