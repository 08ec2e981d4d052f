"""The seam: token ids -> completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Protocol

from tandem.types import Completion, Request

if TYPE_CHECKING:
    import torch


class GenerationEngine(Protocol):
    """Continues token ids by the weights of one known policy version.

    Order of calls: `load_weights` once before the first `generate`; after that in any order. Requests of concurrent
    `generate` calls share the engine's batch. All calls come from one thread and one event loop.
    """

    @property
    def version(self) -> int:
        """The policy version that the engine serves now."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each sample of `request` as it ends, in any order, exactly `len(request.seeds)` in all.

        Raises ValueError before the first sample when prompt and `max_tokens` do not fit the engine.
        """
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Serve `version` from now on. `weights` are (Hugging Face name, tensor); None when memory is shared."""
        ...

    def sleep(self) -> None:
        """Give the KV cache's memory back; only legal while nothing runs. Safe to repeat."""
        ...

    def wake(self) -> None:
        """Undo `sleep`. Safe to repeat."""
        ...

    def abort(self) -> None:
        """End every running and waiting request; their samples come back with finish reason `abort`."""
        ...

    def close(self) -> None:
        """Free everything; the engine is of no use after it."""
        ...
