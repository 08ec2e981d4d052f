"""A generation engine without a model: the shipped test double, with the contract of the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.errors import EngineError
from tandem.generation.base import check_request
from tandem.generation.rows import hits_stop_string
from tandem.generation.sampling import Choice, sample, stream
from tandem.types import Completion, FinishReason, Request

Script = Callable[[Request, int], Sequence[int]]
"""(request, seed) -> the tokens of that sample, which `max_tokens` and stop tokens still cut."""


class FakeEngine:
    """Every next token has one distribution, softmax(logits / temperature), whatever came before.

    With a `script` the tokens are the script's and the log-probs the distribution's; a script that ends early ends its
    sample like a stop token.
    """

    def __init__(
        self,
        logits: Sequence[float],
        *,
        script: Script | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = 4096,
    ) -> None:
        """`logits`: one a token of the vocabulary. `max_tokens`: the longest prompt and response together."""
        self._logits = torch.tensor(logits, dtype=torch.float32)
        self._script = script
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._version: int | None = None
        self._asleep = False
        self._running = 0
        self._aborts = 0

    @property
    def version(self) -> int:
        if self._version is None:
            raise EngineError("the generation engine has no weights yet: call load_weights first")
        return self._version

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        if self._asleep or self._version is None:
            raise EngineError("the generation engine is not ready: call load_weights, and wake after sleep")
        check_request(request, self._max_tokens, self._tokenizer)
        self._running += 1
        aborts = self._aborts
        try:
            for index in range(len(request.seeds)):
                yield await self._complete(request, index, aborts)
        finally:
            self._running -= 1

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        self._version = version

    def sleep(self) -> None:
        if self._running:
            raise EngineError("the generation engine cannot sleep while requests run: await or abort them first")
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def abort(self) -> None:
        self._aborts += 1

    def close(self) -> None:
        self.abort()
        self._asleep = True

    async def _complete(self, request: Request, index: int, aborts: int) -> Completion:
        """One token a turn of the event loop, so that aborts and new versions may come between two."""
        sampling = request.sampling
        tokens, logprobs = self._answer(request, request.seeds[index])
        versions: list[int] = []
        finish = FinishReason.LENGTH if len(tokens) == sampling.max_tokens else FinishReason.STOP
        for made, token in enumerate(tokens.tolist(), 1):
            await asyncio.sleep(0)
            if self._aborts != aborts:
                finish = FinishReason.ABORT
                break
            versions.append(self.version)
            if token in sampling.stop_token_ids or hits_stop_string(
                self._tokenizer, tokens[:made], sampling.stop_strings
            ):
                finish = FinishReason.STOP
                break
        made = len(versions)
        return Completion(index, tokens[:made], logprobs[:made], np.array(versions, dtype=np.int32), finish)

    def _answer(self, request: Request, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 tokens and float32 log-probs of a sample that nothing stops."""
        sampling, longest = request.sampling, request.sampling.max_tokens
        if self._script is not None:
            tokens = torch.tensor(list(self._script(request, seed)[:longest]), dtype=torch.int64)
            logprobs = (self._logits / (sampling.temperature or 1)).log_softmax(-1)[tokens]
        else:
            choice = Choice(
                stream([seed]).repeat(longest),
                np.full(longest, sampling.temperature, dtype=np.float32),
                np.full(longest, sampling.top_k),
                np.full(longest, sampling.top_p),
            )
            tokens, logprobs = sample(self._logits.repeat(longest, 1), choice, np.arange(longest))
        return tokens.numpy().astype(np.int32), logprobs.numpy()
