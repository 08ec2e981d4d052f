"""`tandem serve`: an OpenAI-compatible endpoint on a generation engine. Every request carries the token.

    HTTP threads --coroutine--> the event loop of the main thread <-> engine

GET /v1/models, POST /v1/completions and /v1/chat/completions: n, seed, temperature, top_p, stop, max_tokens, logprobs,
stream.
"""

import asyncio
import hmac
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from threading import Thread
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.config.generation import NativeGenerationConfig, SglangGenerationConfig, VllmGenerationConfig
from tandem.config.tree import ModelConfig
from tandem.data.chat import encode, render
from tandem.data.rows import BadRow
from tandem.errors import TandemError, UserError
from tandem.generation.base import GenerationEngine
from tandem.generation.native import NativeEngine
from tandem.generation.served import start_engine
from tandem.models.loading import load_policy, load_tokenizer, stop_token_ids
from tandem.types import Completion, IntArray, Request, SamplingParams, Status

_LONGEST_BODY = 16 * 2**20
_PIECE_TOKENS = 16  # of a sample, in an event of a stream


class Body(BaseModel):
    """What a client may ask; fields of OpenAI's that are not here are ignored."""

    model_config = ConfigDict(extra="ignore")
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int = Field(default=256, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=1024)
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    stream: bool = False


class Endpoint:
    """Requests -> completions -> answers."""

    def __init__(self, engine: GenerationEngine, tokenizer: Any, stop_ids: tuple[int, ...], name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self.name = name
        self.loop = asyncio.new_event_loop()

    def read(self, path: str, body: bytes) -> tuple[Body, Request]:
        """UserError when it cannot be answered."""
        try:
            asked = Body.model_validate_json(body)
            return asked, self._request(asked, chat=path.endswith("/chat/completions"))
        except (ValidationError, BadRow) as error:
            raise UserError(str(error)) from error

    def answer(self, asked: Body, request: Request) -> dict[str, Any]:
        """UserError when it does not fit the engine."""
        (made,) = self._collect([request])
        choices = [self._choice(completion, asked, self._text(completion.token_ids)) for completion in made]
        new = sum(len(completion.token_ids) for completion in made)
        usage = {"prompt_tokens": len(request.token_ids), "completion_tokens": new}
        usage["total_tokens"] = sum(usage.values())
        return {**self._identity(asked, "chat.completion"), "choices": choices, "usage": usage}

    def stream(self, asked: Body, request: Request) -> Iterator[dict[str, Any]]:
        """The answer in pieces: each a request that continues those before it, made when the last one was taken."""
        self._collect([replace(request, seeds=())])  # refuses what does not fit
        identity = self._identity(asked, "chat.completion.chunk")
        sampling, start, made = request.sampling, len(request.token_ids), 0
        rows, told = dict.fromkeys(range(len(request.seeds)), request.token_ids), dict.fromkeys(range(asked.n), "")
        while rows:
            # a stop string may lie across two pieces
            size = sampling.max_tokens if sampling.stop_strings else min(_PIECE_TOKENS, sampling.max_tokens - made)
            limit = replace(sampling, max_tokens=size)
            parts = [Request(row, limit, _seeds(request.seeds[n], made)) for n, row in rows.items()]
            made += size
            for (sample, row), (piece,) in zip(list(rows.items()), self._collect(parts), strict=True):
                ids = np.concatenate((row, piece.token_ids))
                text = self._text(ids[start:])
                if last := piece.status is not Status.TRUNCATED or made == sampling.max_tokens:
                    del rows[sample]
                else:
                    rows[sample], text = ids, text.rstrip("\ufffd")  # a letter whose bytes have not all come
                choice = self._choice(replace(piece, sample=sample), asked, text[len(told[sample]) :])
                told[sample] = text
                yield {**identity, "choices": [choice if last else {**choice, "finish_reason": None}]}

    def _identity(self, asked: Body, chat: str) -> dict[str, Any]:
        kind, number = chat if asked.messages else "text_completion", random.getrandbits(64)
        return {"id": f"tandem-{number:x}", "object": kind, "created": int(time.time()), "model": self.name}

    def _request(self, asked: Body, chat: bool) -> Request:
        if chat and asked.messages:
            text = render(self._tokenizer, asked.messages, generation_prompt=True)
            ids = encode(self._tokenizer, text, special_tokens=False)
        elif not chat and asked.prompt:
            given = asked.prompt
            ids = given if isinstance(given, list) else encode(self._tokenizer, given, special_tokens=True)
        else:
            raise UserError("give messages to /v1/chat/completions, and prompt to /v1/completions")
        seed = random.getrandbits(63) if asked.seed is None else asked.seed
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        sampling = SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            stop_token_ids=self._stop_ids,
            stop_strings=tuple(stop),
        )
        return Request(np.array(ids, dtype=np.int32), sampling, _seeds(abs(seed), count=asked.n))

    def _collect(self, requests: Sequence[Request]) -> list[list[Completion]]:
        async def one(request: Request) -> list[Completion]:
            return sorted([made async for made in self._engine.generate(request)], key=lambda made: made.sample)

        async def together() -> list[list[Completion]]:
            return await asyncio.gather(*map(one, requests))

        return asyncio.run_coroutine_threadsafe(together(), self.loop).result()

    def _text(self, token_ids: IntArray) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _choice(self, made: Completion, asked: Body, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": made.sample, "logprobs": None}
        choice["finish_reason"] = "stop" if made.status is Status.COMPLETED else "length"
        message = {"delta" if asked.stream else "message": {"role": "assistant", "content": text}}
        choice |= message if asked.messages else {"text": text}
        if asked.logprobs:
            pieces = [self._tokenizer.decode([token]) for token in made.token_ids.tolist()]
            values = made.logprobs.tolist()
            pairs = [{"token": piece, "logprob": value} for piece, value in zip(pieces, values, strict=True)]
            choice["logprobs"] = {"content": pairs} if asked.messages else {"tokens": pieces, "token_logprobs": values}
        return {**choice, "token_ids": made.token_ids.tolist()}


def _seeds(*place: int, count: int = 1) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(place).generate_state(count, "u8").tolist())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, endpoint: Endpoint, token: str, *arguments: Any) -> None:
        self._endpoint = endpoint
        self._token = token
        super().__init__(*arguments)

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._say(404, {"error": {"message": f"no such path: {self.path}"}})
        listed = {"object": "list", "data": [{"id": self._endpoint.name, "object": "model"}]}
        return self._guard(lambda: self._say(200, listed))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _LONGEST_BODY or self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.close_connection = True
            return self._say(404, {"error": {"message": f"no such path, or too long a body: {self.path}"}})
        body = self.rfile.read(length)
        return self._guard(lambda: self._answer(body))

    def _guard(self, answer: Callable[[], None]) -> None:
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return self._say(401, {"error": {"message": "give the token: Authorization: Bearer …"}})
        try:
            return answer()
        except TandemError as error:
            return self._say(400 if isinstance(error, UserError) else 500, {"error": {"message": str(error)}})

    def _answer(self, body: bytes) -> None:
        asked, request = self._endpoint.read(self.path, body)
        if asked.stream:
            chunks = self._endpoint.stream(asked, request)
            with suppress(OSError):  # the client left
                self._say_in_pieces(chain([next(chunks)], chunks))
        else:
            self._say(200, self._endpoint.answer(asked, request))

    def _say_in_pieces(self, chunks: Iterable[dict[str, Any]]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except TandemError as error:
            self.wfile.write(f"data: {json.dumps({'error': {'message': str(error)}})}\n\n".encode())

    def _say(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def make_endpoint(model: ModelConfig, engine: str) -> tuple[Endpoint, GenerationEngine]:
    """On a new engine that serves the directory's weights as version 0."""
    tokenizer = load_tokenizer(model)
    if engine == "native":
        made: GenerationEngine = NativeEngine(
            load_policy(model), max_running=NativeGenerationConfig().max_running, tokenizer=tokenizer
        )
    else:
        config = VllmGenerationConfig(type="vllm") if engine == "vllm" else SglangGenerationConfig(type="sglang")
        made = start_engine(model, config, tokenizer)
    made.load_weights(0, None)
    return Endpoint(made, tokenizer, stop_token_ids(model, tokenizer), model.path.name), made


def listen(endpoint: Endpoint, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """Answers from a thread of its own, while `endpoint.loop` runs."""
    server = ThreadingHTTPServer((host, port), partial(_Handler, endpoint, token))
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(model: ModelConfig, engine: str, host: str, port: int, token: str) -> None:
    """Serve until Ctrl-C."""
    endpoint, made = make_endpoint(model, engine)
    server = listen(endpoint, host, port, token)
    print(f"http://{host}:{server.server_port}/v1  model {endpoint.name}", flush=True)
    try:
        endpoint.loop.run_forever()
    except KeyboardInterrupt:
        server.shutdown()
    finally:
        made.close()
