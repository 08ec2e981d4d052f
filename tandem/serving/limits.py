"""What clients may take of a server: the same limits for every server of ours (docs/serving.md#limits)."""

import resource
from dataclasses import dataclass

HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers."""
DISCARDED_BODIES = 4
"""So many of the longest bodies are let in of one that is refused."""
_FILES_SHARE = 2
"""Connections may take 1 / this of the files that the process may have open: the server opens some itself."""
_SILENT_SHARE = 2
"""And 1 / this of the connections may be of clients that have not sent a request yet."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What may be changed where a server is started."""

    connections: int = 1024
    """Open at once; fewer where the process may not open twice as many files (`ulimit -n`)."""
    client_timeout_s: float = 30.0
    """For what a client is to do next: to send a request's head, each MiB of its body, or to take what was written to
    it. Then its connection is cut."""
    body_mib: float = 16.0
    """Of a request's body."""
    samples: int = 2048
    """That one request asks for: its prompts times `n`."""

    @property
    def connections_here(self) -> int:
        """`connections`, as far as this process may have them."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.connections if files == resource.RLIM_INFINITY else min(self.connections, files // _FILES_SHARE)

    @property
    def silent_connections(self) -> int:
        """Of those, of clients that have not sent a request yet."""
        return max(1, self.connections_here // _SILENT_SHARE)

    @property
    def body_bytes(self) -> int:
        return int(self.body_mib * 2**20)


USUAL = ServerLimits()
