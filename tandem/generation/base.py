"""The seam: token ids -> completions."""

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from torch import Tensor

from tandem.errors import UserError
from tandem.types import Completion, Request


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

        Raises UserError before the first sample when prompt and `max_tokens` do not fit the engine, and EngineError in
        every call under way when generation fails. An iterator that is closed early gives its rows back.
        """
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Serve `version` from now on. `weights` are (Hugging Face name, tensor); None when memory is shared."""

    def sleep(self) -> None:
        """Give the KV cache's memory back: only while nothing runs, and no `generate` before `wake`. Safe to repeat."""

    def wake(self) -> None:
        """Undo `sleep`. Safe to repeat."""

    def abort(self) -> None:
        """End every running and waiting request; their samples come back with status `aborted`."""

    def close(self) -> None:
        """Abort what runs and free everything; the engine is of no use after it."""


def check_request(request: Request, max_tokens: float, tokenizer: Any | None) -> None:
    """UserError unless an engine of `max_tokens` positions a row and this tokenizer can serve the request."""
    tokens, sampling = len(request.token_ids), request.sampling
    if tokens == 0 or sampling.max_tokens < 1 or tokens + sampling.max_tokens > max_tokens:
        raise UserError(
            f"generate: {tokens} prompt tokens and {sampling.max_tokens} new ones; neither may be 0, and the model has "
            f"{max_tokens} positions for both: lower generation.max_response_tokens or data.max_prompt_tokens"
        )
    if sampling.stop_strings and tokenizer is None:
        raise UserError("generate: stop strings need an engine with a tokenizer; give stop token ids instead")
