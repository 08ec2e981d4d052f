"""`breakpoint()` in a worker process: pdb on the controller's terminal, one rank at a time."""

import fcntl
import os
import pdb
from typing import Any

from tandem.cluster.shared_memory import SharedFile
from tandem.errors import UserError


class TerminalPdb(pdb.Pdb):
    """Holds `turn`, and so the terminal, from its first prompt to `continue` or `quit`; other ranks wait for theirs."""

    def __init__(self, name: str, terminal: str | None, turn: SharedFile) -> None:
        if terminal is None:
            raise UserError("breakpoint() in a worker: the controller's standard input is no terminal")
        descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        super().__init__(stdin=os.fdopen(descriptor), stdout=os.fdopen(os.dup(descriptor), "w"), nosigint=True)
        self.prompt = f"({name}) "
        self._turn = turn.descriptor

    def interaction(self, *args: Any) -> None:
        fcntl.lockf(self._turn, fcntl.LOCK_EX)
        super().interaction(*args)

    def set_continue(self) -> None:
        super().set_continue()
        fcntl.lockf(self._turn, fcntl.LOCK_UN)


def is_open(turn: SharedFile) -> bool:
    """Some rank is at a prompt."""
    try:
        fcntl.lockf(turn.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(turn.descriptor, fcntl.LOCK_UN)
    return False
