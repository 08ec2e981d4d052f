"""One HTTP request -> requests to the engine -> one object, or the chunks of a stream.

Choices i * n … i * n + n - 1 are those of prompt i. A prompt's samples have the seeds that they would have alone, and a
stream draws what the whole answer draws.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np

from tandem.errors import UserError
from tandem.serving.base import Answerer
from tandem.serving.choice import Choice
from tandem.serving.errors import RequestError, Stopping
from tandem.serving.parameters import AnyParameters, ChatParameters, CompletionParameters
from tandem.serving.shapes import ChatShape, Object, Shape, TextShape
from tandem.types import Completion, Delta, IntArray, Request, SamplingParams, Status

Item = TypeVar("Item")
_LEAST_TOP_P = 1e-9
"""Of the published 0, which keeps the most probable token alone: engines want more than 0."""


class Answer:
    """The answer to one HTTP request. Making it raises UserError if any part of it cannot be answered."""

    def __init__(self, answerer: Answerer, params: AnyParameters) -> None:
        if params.model != answerer.name:
            raise RequestError(
                f"model: {params.model!r} does not exist; this endpoint serves {answerer.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )
        self._answerer = answerer
        self._params = params
        seed = random.getrandbits(63) if params.seed is None else params.seed
        seeds = np.random.SeedSequence(seed & 0xFFFF_FFFF_FFFF_FFFF).generate_state(params.n, "u8").tolist()
        self._requests = [
            Request(prompt, _sampling(params, answerer, prompt), tuple(seeds)) for prompt in answerer.prompts(params)
        ]
        for request in self._requests:
            _check(request, answerer, params)
        self._shape = _shape(answerer, params)
        self._choices = self._make_choices()
        self._made = 0
        """Tokens so far, of all choices."""

    async def whole(self) -> Object:
        """The answer as one object."""
        async with aclosing(self._outputs(self._answerer.generate)) as outputs:
            async for choice, completion in outputs:
                choice.push(completion)
        choices = [self._shape.choice(choice.take()) for choice in self._choices]
        return {**self._identity(self._shape.whole), "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[Object]:
        """The answer as the chunks of a stream."""
        with_usage = self._params.stream_options.include_usage
        frame = self._identity(self._shape.chunk) | ({"usage": None} if with_usage else {})
        for index, choice in enumerate(self._choices):
            if opening := self._shape.opening(index):
                yield {**frame, "choices": [opening]}
            if choice.has_news:  # the prompt's echo
                yield {**frame, "choices": [self._shape.part(choice.take())]}
        async with aclosing(self._outputs(self._answerer.stream)) as outputs:
            async for choice, delta in outputs:
                if not choice.ended:
                    choice.push(delta)
                    yield {**frame, "choices": [self._shape.part(choice.take())]}
        if with_usage:
            yield {**frame, "choices": [], "usage": self._usage()}

    async def _outputs(
        self, ask: Callable[[Request], AsyncIterator[Any]]
    ) -> AsyncGenerator[tuple[Choice, Completion | Delta]]:
        requests = [request for request in self._requests if request.sampling.max_tokens > 0]
        async with aclosing(merged([ask(request) for request in requests])) as merged_outputs:
            async for number, output in merged_outputs:
                if output.status is Status.ABORTED:
                    raise Stopping
                self._made += len(output.token_ids)
                yield self._choices[number * self._params.n + output.sample], output

    def _make_choices(self) -> list[Choice]:
        """Those that get no tokens have ended."""
        choices: list[Choice] = []
        for place, request in enumerate(self._requests):
            for _ in request.seeds:
                choice = Choice(len(choices), self._answerer, request, self._echo(place))
                if request.sampling.max_tokens == 0:
                    choice.end(Status.TRUNCATED)
                choices.append(choice)
        return choices

    def _echo(self, place: int) -> str:
        if not isinstance(self._params, CompletionParameters) or not self._params.echo:
            return ""
        given = self._params.prompt[place]
        return given if isinstance(given, str) else self._answerer.decode(given, special_tokens=True)

    def _identity(self, kind: str) -> Object:
        return {
            "id": f"{self._shape.prefix}-{random.getrandbits(96):024x}",
            "object": kind,
            "created": int(time.time()),
            "model": self._answerer.name,
            "system_fingerprint": f"policy-{self._answerer.version}",
        }

    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(len(request.token_ids) for request in self._requests)
        total = prompt_tokens + self._made
        return {"prompt_tokens": prompt_tokens, "completion_tokens": self._made, "total_tokens": total}


def _shape(answerer: Answerer, params: AnyParameters) -> Shape:
    if isinstance(params, ChatParameters):
        return ChatShape(answerer, params.logprobs)
    return TextShape(answerer, params.logprobs is not None)


def _sampling(params: AnyParameters, answerer: Answerer, prompt: IntArray) -> SamplingParams:
    defaults = answerer.defaults
    max_tokens = params.max_tokens
    if isinstance(params, ChatParameters):
        room = int(min(defaults.max_tokens, answerer.limits.positions - len(prompt)))
        max_tokens = params.max_completion_tokens or params.max_tokens or max(room, 1)
    assert max_tokens is not None, "text completions have a default"
    return SamplingParams(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_p=defaults.top_p if params.top_p is None else max(params.top_p, _LEAST_TOP_P),
        top_k=defaults.top_k if params.top_k is None else params.top_k,
        max_tokens=max_tokens,
        stop_token_ids=defaults.stop_token_ids,
        stop_strings=defaults.stop_strings if params.stop is None else tuple(params.stop),
    )


def _check(request: Request, answerer: Answerer, params: AnyParameters) -> None:
    """Raises RequestError on what the engine would refuse."""
    limits, tokens, new = answerer.limits, len(request.token_ids), request.sampling.max_tokens
    param = "messages" if isinstance(params, ChatParameters) else "prompt"
    if tokens == 0 and new > 0:
        raise RequestError(f"{param}: there are no tokens to continue", param=param, code="invalid_value")
    if tokens + new > limits.positions:
        raise RequestError(
            f"this model has {limits.positions} positions, but {tokens} tokens in the prompt and {new} in the answer "
            "were asked for; shorten either",
            param=param,
            code="context_length_exceeded",
        )
    try:
        if new:
            limits.check(request)
        else:
            limits.check_ids(request.token_ids)
    except UserError as error:
        raise RequestError(str(error), param=param, code="invalid_value") from None


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """The items of all streams as they come, with the stream's number. Closing it closes them all."""
    arrived: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue()

    async def follow(number: int, stream: AsyncIterator[Item]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((number, item))
            arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            arrived.put_nowait(error)

    following = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(streams):
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
