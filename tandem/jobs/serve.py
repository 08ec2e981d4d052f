"""`tandem serve`: a model directory behind OpenAI's interface. Every request carries the token.

uvicorn -> serving/app.py -> EngineAnswerer -> generation engine        all on one event loop
"""

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.data import ImagesConfig
from tandem.config.tree import ServeConfig
from tandem.data.chat import TooLong, encode, render, require_shown
from tandem.data.rows import BadRow
from tandem.generation.base import EngineLimits, GenerationEngine
from tandem.generation.native import NativeEngine
from tandem.generation.start import start_engine
from tandem.models.loading import load_policy, load_tokenizer, never_drawn, stop_token_ids
from tandem.models.rendering import TemplateFailed, rendered
from tandem.models.tower import PictureTower
from tandem.pictures.shown import ModelPictures
from tandem.pictures.vlm_config import PICTURES_ON_VLLM, model_type, sees_pictures
from tandem.rollout.conversation_images import Line, with_all_tokens
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.session import PolicyEndpoint, Rules, Session
from tandem.serving.app import make_app
from tandem.serving.capture import Capture
from tandem.serving.errors import RequestError
from tandem.serving.fair_order import FairOrder
from tandem.serving.limits import USUAL, ServerLimits
from tandem.serving.parameters import AnyParameters, ChatParameters
from tandem.serving.request_images import RecentPictures, refused, with_pictures
from tandem.serving.server import Server
from tandem.serving.sessions import Sessions
from tandem.signals import heeded
from tandem.types import Completion, Delta, Request, SamplingParams

_AHEAD = 8
"""The engine has 1 / this of its slots in samples that it begins when others end, without waiting for the next ones."""


@dataclass(frozen=True)
class EngineAnswerer:
    """An Answerer: the tokenizer of a model directory, and an engine that has its weights."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    name: str
    defaults: SamplingParams
    calls: str = "auto"
    """How the model writes calls of tools, as `make_format` has it."""
    pictures: ModelPictures | None = None
    """Of a model and an engine that see pictures."""

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def version(self) -> int:
        return self.engine.version

    def prompts(self, params: AnyParameters) -> list[Line]:
        if isinstance(params, ChatParameters):
            return [self._chat(params)]
        prompts = (
            self._ids(given, "prompt", special_tokens=True) if isinstance(given, str) else given
            for given in params.prompt
        )
        return [Line(np.array(prompt, dtype=np.int32)) for prompt in prompts]

    @property
    def turns(self) -> FairOrder:
        return self._turns

    @cached_property
    def _turns(self) -> FairOrder:
        return FairOrder(lambda: max(1, self.limits.max_running + self.limits.max_running // _AHEAD))

    def policy(self) -> PolicyEndpoint:
        return self._policy

    @cached_property
    def _policy(self) -> PolicyEndpoint:
        return PolicyEndpoint(
            chat_format=make_format(self.tokenizer, self.defaults.stop_token_ids, self.calls),
            generate=self._generate_in_turn,
            positions=lambda: self.limits.positions,
            decode=partial(self.decode, special_tokens=True),
            pictures=self.pictures,
        )

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens))

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        return self.engine.generate(request)

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        return self.engine.stream(request)

    def _generate_in_turn(self, request: Request) -> AsyncIterator[Completion]:
        """Each call of a session has turns of its own."""
        return self.turns.take(object(), len(request.seeds), self.generate(request))

    def _ids(self, text: str, param: str, *, special_tokens: bool) -> list[int]:
        """Raises RequestError where the model has no room for them."""
        try:
            return encode(self.tokenizer, text, special_tokens=special_tokens, most_tokens=self.limits.positions)
        except TooLong as error:
            raise RequestError(
                f"this model has {self.limits.positions} positions, and the prompt has {error}; shorten it",
                param=param,
                code="context_length_exceeded",
            ) from None

    def _chat(self, params: ChatParameters) -> Line:
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template; ask /v1/completions, or serve a directory with chat_template.jinja",
                param="messages",
            )
        messages = with_pictures([message.plain() for message in params.messages], self.pictures)
        try:
            arguments = _template_arguments(self.tokenizer, params)
            text = render(self.tokenizer, messages, generation_prompt=True, arguments=arguments)
            require_shown(self.tokenizer, messages, generation_prompt=True, arguments=arguments)
        except BadRow as error:
            raise RequestError(str(error), param="messages", code="invalid_value") from None
        ids = self._ids(text, "messages", special_tokens=False)
        with refused(messages, self.pictures):
            return with_all_tokens(ids, messages, self.pictures)


def _template_arguments(tokenizer: PreTrainedTokenizerBase, params: ChatParameters) -> Mapping[str, Any]:
    """Raises RequestError on what is no variable of the template, but tells the tokenizer what to do with it."""
    given = params.chat_template_kwargs
    if taken := sorted(given.keys() & signature(tokenizer.apply_chat_template).parameters.keys()):
        raise RequestError(
            f"chat_template_kwargs: {taken[0]!r} is no variable of the chat template; leave it out",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return given


def make_answerer(config: ServeConfig, name: str, pictures: Path | None = None) -> EngineAnswerer:
    """An answerer on a new engine, which has the directory's weights as version 0; requests call the model `name`.

    `pictures`: where those that requests show are stored, if the model sees any.
    """
    model, generation = config.model, config.generation
    tokenizer, seen = load_tokenizer(model), None
    _try_template(tokenizer)
    engines_see = generation.type == "native" or (
        generation.type == "vllm" and model_type(model.path) in PICTURES_ON_VLLM
    )
    if pictures is not None and engines_see and sees_pictures(model.path):
        seen = ModelPictures(model.path, ImagesConfig(), pictures, store=RecentPictures(pictures))
    if generation.type == "native":
        policy = load_policy(model)
        engine: GenerationEngine = NativeEngine(
            policy,
            max_running=generation.max_running,
            tokenizer=tokenizer,
            record=None if generation.cuda_graphs else False,
            prefix_cache_tokens=generation.prefix_cache_tokens,
            tower=None if seen is None else PictureTower(policy, model.path, seen.store.read),
            never_drawn=never_drawn(model, tokenizer),
        )
    else:
        engine = start_engine(model, generation, tokenizer, pictures=seen and pictures)
    try:
        engine.load_weights(0, None)
    except BaseException:  # also Ctrl-C: its processes would go on loading
        engine.close()
        raise
    defaults = SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_tokens=generation.max_response_tokens,
        stop_token_ids=stop_token_ids(model, tokenizer),
        stop_strings=tuple(generation.stop_strings),
    )
    return EngineAnswerer(engine, tokenizer, name, defaults, pictures=seen)


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where the chat template does not end, now and not at the first request."""
    if tokenizer.chat_template is not None:
        with suppress(TemplateFailed):  # it may want other messages
            rendered(tokenizer, [{"role": "user", "content": "u"}], generation_prompt=True)


def run(
    config: ServeConfig,
    reserved: socket.socket,
    token: str,
    name: str,
    calls: str,
    sessions: Sessions | None = None,
    limits: ServerLimits = USUAL,
) -> signal.Signals | None:
    """Serve until Ctrl-C or SIGTERM. Returns the signal where one came before there was anything to serve.

    `calls`: as `EngineAnswerer` has it; with `sessions` what is asked in them is recorded.
    """
    with TemporaryDirectory(prefix="tandem-pictures-") as pictures:
        try:
            with _stop_signals_raise():
                answerer = replace(make_answerer(config, name, Path(pictures)), calls=calls)
        except _Stopped as stopped:
            return stopped.by
        with closing(answerer.engine):
            asyncio.run(make_server(answerer, reserved, token, sessions, limits).run_until_stopped())
    return None


def make_server(
    answerer: EngineAnswerer,
    reserved: socket.socket,
    token: str,
    sessions: Sessions | None = None,
    limits: ServerLimits = USUAL,
) -> Server:
    """Raises UserError where there are to be sessions, and the model cannot hold conversations."""
    capture = None if sessions is None else _capture(answerer, sessions, token, limits)
    app = make_app(answerer, token, capture, limits=limits)

    def on_stop() -> None:
        app.state.endpoint.stopping = True
        if sessions is not None:
            sessions.close()
        answerer.turns.stop()  # before others end, and it would be somebody's turn
        answerer.engine.abort()

    def on_start(url: str) -> None:
        print(f"{url}  model {answerer.name}", flush=True)

    return Server(app, reserved, limits=limits, on_start=on_start, on_stop=on_stop)


def _capture(answerer: EngineAnswerer, sessions: Sessions, token: str, limits: ServerLimits) -> Capture:
    policy, rules = answerer.policy(), Rules(answerer.defaults)

    def make() -> Session:
        return Session(policy, rules, seed=secrets.randbits(63))

    return Capture(sessions, token, make, answerer.name, limits)


class _Stopped(BaseException):
    """A signal asked to stop while the model was loaded. No Exception: nothing on the way may take it for a failure."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by


@contextmanager
def _stop_signals_raise() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _Stopped(signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
