"""One HTTP request -> requests to the engine -> one object, or the chunks of a stream.

Choices i * n … i * n + n - 1 are those of prompt i. A stream draws what the whole answer draws.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from tandem.serving.base import Answerer
from tandem.serving.choice import Choice
from tandem.serving.detokenizer import Decoder
from tandem.serving.errors import Stopping
from tandem.serving.parameters import AnyParameters, ChatParameters, CompletionParameters
from tandem.serving.requests import asked_of_engines, make_requests
from tandem.serving.shapes import ChatShape, EndpointSchema, Object, TextShape
from tandem.types import Completion, Delta, Request, Status

Item = TypeVar("Item")


class RequestOutput:
    """The answer to one HTTP request. Making it raises UserError if any part of it cannot be answered."""

    def __init__(self, answerer: Answerer, params: AnyParameters) -> None:
        self._answerer = answerer
        self._params = params
        self._requests = make_requests(params, answerer)
        self._shape = _shape(answerer, params)
        self._choices = [
            Choice(place * params.n + sample, request, answerer.decode, self._echo(place))
            for place, request in enumerate(self._requests)
            for sample in range(params.n)
        ]

    async def whole(self) -> Object:
        """The answer as one object."""
        async with aclosing(self._changed(self._answerer.generate)) as changed:
            async for _ in changed:
                pass
        choices = [{**self._shape.choice(choice.take()), **self._of_prompt(choice)} for choice in self._choices]
        of_chat = self._of_prompt(None)
        return {**self._identity(self._shape.whole), **of_chat, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[Object]:
        """The answer as the chunks of a stream."""
        with_usage = self._params.stream_options.include_usage
        frame = self._identity(self._shape.chunk) | ({"usage": None} if with_usage else {})
        for index in range(len(self._choices)):
            if opening := self._shape.opening(index):
                yield {**frame, **self._of_prompt(None), "choices": [opening]}
        unbegun = {id(choice) for choice in self._choices}
        async with aclosing(self._changed(self._answerer.stream)) as changed:
            async for choice in changed:
                of_prompt = self._of_prompt(choice) if id(choice) in unbegun else {}
                unbegun.discard(id(choice))
                yield {**frame, "choices": [{**self._shape.part(choice.take()), **of_prompt}]}
        if with_usage:
            yield {**frame, "choices": [], "usage": self._usage()}

    def _of_prompt(self, choice: Choice | None) -> Object:
        """The prompt's token ids where they are wanted: in each choice of a text completion, once in a chat (None)."""
        if not self._params.return_token_ids or isinstance(self._params, ChatParameters) != (choice is None):
            return {}
        request = self._requests[0 if choice is None else self._choices.index(choice) // self._params.n]
        return {"prompt_token_ids": request.token_ids.tolist()}

    async def _changed(self, ask: Callable[[Request], AsyncIterator[Any]]) -> AsyncGenerator[Choice]:
        """Yields each choice whenever it has something new, until all have ended."""
        if not self._asks_engine:
            for choice in self._choices:
                choice.end(Status.TRUNCATED)
                yield choice
            return
        async with aclosing(merged([self._in_turn(ask, request) for request in self._requests])) as outputs:
            async for number, output in outputs:
                choice = self._choices[number * self._params.n + output.sample]
                if not choice.ended:
                    self._push(choice, number, output)
                    yield choice

    def _in_turn(self, ask: Callable[[Request], AsyncIterator[Any]], request: Request) -> AsyncIterator[Any]:
        """What the engine answers, when it is this HTTP request's turn."""
        return self._answerer.turns.take(self, len(request.seeds), ask(asked_of_engines(request)))

    @property
    def _asks_engine(self) -> bool:
        return self._params.max_tokens != 0 or self._params.scores_prompts

    def _push(self, choice: Choice, place: int, output: Completion | Delta) -> None:
        if output.status is Status.ABORTED:
            raise Stopping
        request = self._requests[place]
        if output.prompt is not None:
            choice.push_prompt(request, output.prompt, self._decode_echo(place))
        if request.sampling.max_tokens == 0:
            choice.end(Status.TRUNCATED)
            return
        choice.push(output)

    def _echo(self, place: int) -> str:
        """The prompt as the answer repeats it: text as it was given, token ids as their text."""
        if not isinstance(self._params, CompletionParameters) or not self._params.echo:
            return ""
        given = self._params.prompt[place]
        return given if isinstance(given, str) else self._decode_echo(place)(given)

    def _decode_echo(self, place: int) -> Decoder:
        """The decoder for the echo of a prompt; it shows special tokens where the prompt was given as token ids."""
        as_ids = isinstance(self._params, CompletionParameters) and not isinstance(self._params.prompt[place], str)
        return partial(self._answerer.decode, special_tokens=as_ids)

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
        made = sum(choice.count for choice in self._choices)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


def _shape(answerer: Answerer, params: AnyParameters) -> EndpointSchema:
    spell = partial(answerer.decode, special_tokens=True)
    if isinstance(params, ChatParameters):
        return ChatShape(spell, params.logprobs)
    return TextShape(spell, params.logprobs is not None, params.prompt_logprobs is not None)


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yields the items of all streams as they come, each with its stream's number. Closing it closes them all."""
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
