"""Answers that outlive their engine's sleep: what was made is kept, and after `resume` the engine goes on from there.

    generate(request) --> engine.generate --pause()--> aborted parts ~~resume()~~> prompt + made --> joined completions

consumes:     requests, also while the engine sleeps
produces:     whole completions, each when it ends
waits for:    the engine, and while it sleeps for `resume`
unblocked by: the engine's completions; `resume`
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.generation.base import GenerationEngine
from tandem.generation.stopping import holds_stop_string, longest_stop_string
from tandem.types import Completion, IntArray, Request, Status


class ResumableGeneration:
    """`generate` of an engine that may be put to sleep while requests run. All calls come from the engine's thread."""

    def __init__(self, engine: GenerationEngine, tokenizer: Any) -> None:
        """`tokenizer` is needed for stop strings alone."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._awake = asyncio.Event()
        self._awake.set()
        self._pauses = 0
        """How often what ran was aborted, to be continued."""
        self.unfinished: int = 0
        """Samples of `generate` that have not ended."""

    @property
    def awake(self) -> bool:
        return self._awake.is_set()

    def pause(self) -> None:
        """Let the engine sleep until `resume`; what runs stands still meanwhile. Safe to repeat."""
        self._awake.clear()
        if self.unfinished:
            self._pauses += 1
            self._engine.abort()
        self._engine.sleep()

    def resume(self) -> None:
        """Wake the engine, and let what was under way go on. Safe to repeat."""
        self._engine.wake()
        self._awake.set()

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """As the engine's own `generate`. A sample that `pause` met has tokens of several policy versions, which never
        fall; one that was aborted otherwise stays aborted."""
        assert not request.top_logprobs and not request.prompt_logprobs, "they are not joined"
        pending = len(request.seeds)
        self.unfinished += pending
        continued: list[asyncio.Task[Completion]] = []
        try:
            async for part, paused in self._ask(request):
                if paused:
                    continued.append(asyncio.create_task(self._continue(request, part)))
                else:
                    pending, self.unfinished = pending - 1, self.unfinished - 1
                    yield part
            for ended in asyncio.as_completed(continued) if continued else ():
                completion = await ended
                pending, self.unfinished = pending - 1, self.unfinished - 1
                yield completion
        finally:
            self.unfinished -= pending
            for task in continued:
                task.cancel()

    async def _ask(self, request: Request) -> AsyncIterator[tuple[Completion, bool]]:
        """The engine's completions, each with whether it is one that a pause has cut short."""
        while not self.awake:
            await self._awake.wait()
        pauses = self._pauses
        async for completion in self._engine.generate(request):
            yield completion, completion.status is Status.ABORTED and pauses < self._pauses

    async def _continue(self, request: Request, made: Completion) -> Completion:
        """The whole of a sample of which a pause left `made`."""
        sampling, paused = request.sampling, True
        while paused:
            tokens_left = sampling.max_tokens - len(made.token_ids)
            if tokens_left == 0:
                return replace(made, status=Status.TRUNCATED)
            rest = replace(
                request,
                token_ids=np.concatenate((request.token_ids, made.token_ids)),
                sampling=replace(sampling, max_tokens=tokens_left),
                seeds=(request.seeds[made.sample],),
                made=len(made.token_ids),
            )
            async for part, paused in self._ask(rest):
                made = self._joined(request, made, part)
                paused = paused and made.status is Status.ABORTED  # else a stop string lay over the seam
        return made

    def _joined(self, request: Request, made: Completion, part: Completion) -> Completion:
        """One completion of what was made and what the engine has added to it."""
        strings = request.sampling.stop_strings
        end = _end_over_seam(made.token_ids, part.token_ids, strings, self._tokenizer) if strings else None
        token_ids = np.concatenate((made.token_ids, part.token_ids[:end]))
        return Completion(
            made.sample,
            token_ids,
            np.concatenate((made.logprobs, part.logprobs[:end])),
            np.concatenate((made.versions, part.versions[:end])),
            status=part.status if end is None else Status.COMPLETED,
            experts=_joined_experts(len(request.token_ids) + len(token_ids) - 1, made, part),
        )


def _end_over_seam(made: IntArray, new: IntArray, strings: tuple[str, ...], tokenizer: Any) -> int | None:
    """How many of the new tokens belong to an answer that a stop string ends which began in the tokens made before.

    An engine sees the text of the new tokens alone, and goes on. None: there is no such string.
    """
    if len(made) == 0:
        return None
    for end in range(1, min(len(new), longest_stop_string(strings)) + 1):
        if holds_stop_string(np.concatenate((made, new[:end])), strings, tokenizer):
            return end
    return None


def _joined_experts(positions: int, made: Completion, part: Completion) -> IntArray | None:
    """Those of the pass that made each token: the later pass has run over what was made before as a prompt."""
    if made.experts is None or part.experts is None:
        return part.experts if len(made.token_ids) == 0 else None
    return np.concatenate((made.experts, part.experts[len(made.experts) :]))[:positions]
