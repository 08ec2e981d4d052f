"""`breakpoint()` in a worker process: pdb on the controller's terminal, one rank at a time."""

import fcntl
import os
import pdb
from types import FrameType, TracebackType

from tandem.cluster.shared_memory import SharedFile
from tandem.errors import UserError


class TerminalPdb(pdb.Pdb):
    """Holds `turn`, and so the terminal, from its first prompt to `continue` or `quit`; other ranks wait for theirs."""

    def __init__(self, terminal: str | None, turn: SharedFile, name: str) -> None:
        if terminal is None:
            raise UserError("breakpoint() in a worker: the controller's standard input is no terminal")
        reading, writing = (open(terminal, mode, opener=_open) for mode in "rw")  # noqa: SIM115
        super().__init__(stdin=reading, stdout=writing, nosigint=True)
        self.prompt = f"({name}) "
        self._turn = turn.descriptor

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        fcntl.lockf(self._turn, fcntl.LOCK_EX)
        super().interaction(frame, traceback)

    def set_continue(self) -> None:
        super().set_continue()
        fcntl.lockf(self._turn, fcntl.LOCK_UN)

    def set_quit(self) -> None:
        super().set_quit()
        fcntl.lockf(self._turn, fcntl.LOCK_UN)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOCTTY)


def is_open(turn: SharedFile) -> bool:
    """Somebody is at a prompt."""
    try:
        fcntl.lockf(turn.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(turn.descriptor, fcntl.LOCK_UN)
    return False
