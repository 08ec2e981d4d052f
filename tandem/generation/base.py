"""The seam: token ids -> completions, whole or as they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tandem.errors import UserError
from tandem.pictures.marks import PictureNumbers
from tandem.types import Completion, Delta, IntArray, Request, check_temperature

if TYPE_CHECKING:
    from torch import Tensor

_INT32 = 2**31


class GenerationEngine(Protocol):
    """Continues token ids by the weights of one known policy version.

    Order of calls: `load_weights` once before the first request; after that in any order. Requests of concurrent
    `generate` and `stream` calls share the engine's batch. All calls come from one thread and one event loop.
    """

    @property
    def version(self) -> int:
        """The policy version that the engine serves now."""
        ...

    @property
    def limits(self) -> EngineLimits:
        """What requests must keep to; known once weights are loaded."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each sample of `request` as it ends, in any order, exactly `len(request.seeds)` in all.

        Raises UserError before the first sample when the request does not keep to `limits`, and EngineError in every
        call under way when generation fails. An iterator that is closed early gives its rows back. Weights that are
        loaded meanwhile make the tokens from then on: versions within a sample never fall.

        A request with `keep` lets the engine keep what it computes for it, until weights are loaded or it sleeps: one
        that begins with the same tokens, whoever asks, is spared computing them again.

        A request that continues an answer (`made` > 0) draws by other random numbers than its beginning did. Stop
        strings may be looked for in the new text alone: `ResumableGeneration` looks at the seam.
        """
        ...

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the tokens of `request` as they are made: joined, the deltas of a sample are what `generate` yields.

        The last delta of a sample has its status, and may have no tokens. Raises and closes as `generate` does.
        """
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Serve `version` from now on. `weights` are (Hugging Face name, tensor); None when memory is shared."""

    def sleep(self) -> None:
        """Give the KV cache's memory back: only while nothing runs, and no request before `wake`. Safe to repeat."""

    def wake(self) -> None:
        """Undo `sleep`. Safe to repeat."""

    def abort(self) -> None:
        """End every running and waiting request; their samples come back with status `aborted` and the tokens that
        they have, from which a caller may go on."""

    def close(self) -> None:
        """Abort what runs and free everything; the engine is of no use after it."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request to an engine must keep to."""

    positions: float
    """The most tokens of a row, prompt and response together; infinite where the model has no bound."""
    vocabulary: int
    """Token ids are 0 … vocabulary - 1."""
    stop_strings: bool
    """The engine has a tokenizer, which stop strings need."""
    max_running: int
    """Samples that are generated at once; further ones wait."""
    placeholder: int | None = None
    """Stands once for each token of a picture, where the engine sees those of a request; None: it sees none."""
    scores_full_prompts: bool = False
    """A prompt whose own log-probs are wanted may take all positions where one new token is: that one is not fed."""

    def fits(self, request: Request) -> bool:
        """Whether the positions are enough for the prompt and its answer."""
        tokens, new = len(request.token_ids), request.sampling.max_tokens
        if self.scores_full_prompts and request.prompt_logprobs and new == 1:
            return tokens <= self.positions
        return tokens + new <= self.positions

    def check(self, request: Request) -> None:
        """Raises UserError unless an engine of these limits can serve `request`."""
        tokens, sampling = len(request.token_ids), request.sampling
        if tokens == 0 or sampling.max_tokens < 1 or not self.fits(request):
            raise UserError(
                f"generate: {tokens} prompt tokens and {sampling.max_tokens} new ones; neither may be 0, and the model "
                f"has {self.positions} positions for both: "
                "lower generation.max_response_tokens or data.max_prompt_tokens"
            )
        self.check_ids(request.token_ids)
        try:
            check_temperature(sampling.temperature)
        except ValueError as error:
            raise UserError(f"generate: temperature {sampling.temperature}: {error}") from None
        if not 0 <= sampling.top_k < _INT32 or not 0 < sampling.top_p <= 1:
            raise UserError(
                f"generate: top_k {sampling.top_k} and top_p {sampling.top_p}: top_k is 0, which keeps the whole "
                f"vocabulary, or at most {_INT32 - 1}, and top_p above 0 and at most 1"
            )
        self._check_pictures(request)
        if sampling.stop_strings and not self.stop_strings:
            raise UserError("generate: stop strings need an engine with a tokenizer; give stop token ids instead")

    def _check_pictures(self, request: Request) -> None:
        """Raises UserError unless placeholders stand where the request's pictures do, and nowhere else."""
        if self.placeholder is None:
            if request.pictures:
                raise UserError("generate: this engine sees no pictures, and their placeholders alone mean nothing")
            return
        if request.pictures and request.prompt_logprobs:
            raise UserError("generate: prompt_logprobs of a prompt with pictures are not computed yet")
        try:
            marked = PictureNumbers().mark(request.token_ids, request.pictures)
        except ValueError as error:
            raise UserError(f"generate: {error}") from None
        steps = (request.token_ids[picture.place] for picture in request.pictures if picture.step)
        standing = np.array([self.placeholder, *steps])  # videos have a token of their own
        if np.isin(marked, standing).any() or (marked < 0).sum() != np.isin(request.token_ids, standing).sum():
            raise UserError("generate: the prompt has places for pictures, and no pictures there")

    def check_ids(self, token_ids: IntArray) -> None:
        """Raises UserError on ids that no token of the vocabulary has.

        One that reached a model would fail the whole batch, or be taken for another token.
        """
        outside = np.flatnonzero((token_ids < 0) | (token_ids >= self.vocabulary))
        if len(outside):
            raise UserError(
                f"generate: token id {token_ids[outside[0]]} at position {outside[0]} of the prompt is not in the "
                f"model's vocabulary (0 … {self.vocabulary - 1}): take the tokenizer of the model directory"
            )
