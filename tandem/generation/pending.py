"""What a call of `generate` or `stream` waits for: the samples of its request."""

import asyncio
from dataclasses import dataclass

import numpy as np

from tandem.types import Completion, Delta, Request, Status

Results = asyncio.Queue[Completion | Delta | Exception]
"""The queue that one call reads; an exception in it ends the call."""


@dataclass(eq=False, slots=True)
class PendingSample:
    """One sample of a request, from the call until it has ended."""

    request: Request
    index: int
    """Into the request's seeds."""
    streamed: bool
    """The caller gets deltas, not one completion."""
    results: Results

    def end_without_tokens(self) -> None:
        """Tell the caller that the sample was aborted before any token that it has not had."""
        nothing = np.zeros(0, dtype=np.int32)
        kind = Delta if self.streamed else Completion
        self.results.put_nowait(kind(self.index, nothing, nothing.astype(np.float32), nothing, Status.ABORTED))
