"""Parameters -> what the engine is asked: one request a prompt, each checked before any is asked."""

import random
from dataclasses import replace

import numpy as np

from tandem.errors import UserError
from tandem.serving.base import Answerer
from tandem.serving.errors import RequestError
from tandem.serving.parameters import AnyParameters, ChatParameters
from tandem.types import IntArray, Request, SamplingParams

LEAST_TOP_P = 1e-9
"""Stands for the published 0, which keeps the most probable token alone: engines want more than 0."""


def make_requests(params: AnyParameters, answerer: Answerer) -> list[Request]:
    """Raises UserError if any of them cannot be answered.

    Their `max_tokens` is what was asked for, 0 included, which no engine serves. A prompt's samples have the seeds that
    they would have alone, and sample i has the same for every n.
    """
    check_model(params, answerer)
    seed = random.getrandbits(63) if params.seed is None else params.seed
    seeds = np.random.SeedSequence(seed & 0xFFFF_FFFF_FFFF_FFFF).generate_state(params.n, "u8").tolist()
    requests = [
        Request(
            prompt.ids,
            _sampling(params, answerer, prompt.ids),
            tuple(seeds),
            top_logprobs=_top_logprobs(params),
            prompt_logprobs=params.scores_prompts,
            keep=isinstance(params, ChatParameters),
            pictures=prompt.pictures,
        )
        for prompt in answerer.prompts(params)
    ]
    for request in requests:
        _check(request, answerer, "messages" if isinstance(params, ChatParameters) else "prompt")
    return requests


def check_model(params: AnyParameters, answerer: Answerer) -> None:
    """Raises RequestError where another model is asked for."""
    if params.model != answerer.name:
        raise RequestError(
            f"model: {params.model!r} does not exist; this endpoint serves {answerer.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _sampling(params: AnyParameters, answerer: Answerer, prompt: IntArray) -> SamplingParams:
    defaults = answerer.defaults
    if isinstance(params, ChatParameters):
        room = int(min(defaults.max_tokens, answerer.limits.positions - len(prompt)))
        max_tokens = params.max_completion_tokens or params.max_tokens or max(room, 1)
    else:
        max_tokens = params.max_tokens
    return SamplingParams(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_p=defaults.top_p if params.top_p is None else max(params.top_p, LEAST_TOP_P),
        top_k=defaults.top_k if params.top_k is None else params.top_k,
        max_tokens=max_tokens,
        stop_token_ids=defaults.stop_token_ids,
        stop_strings=defaults.stop_strings if params.stop is None else tuple(params.stop),
    )


def _top_logprobs(params: AnyParameters) -> int:
    if isinstance(params, ChatParameters):
        return params.top_logprobs or 0
    return params.prompt_logprobs or params.logprobs or 0


def asked_of_engines(request: Request) -> Request:
    """The request, with one token to draw where only the prompt is to be scored, as engines draw at least one."""
    return replace(request, sampling=replace(request.sampling, max_tokens=max(request.sampling.max_tokens, 1)))


def _check(request: Request, answerer: Answerer, param: str) -> None:
    """Raises RequestError, with the parameter at fault, on what the engine would refuse."""
    limits, tokens, new = answerer.limits, len(request.token_ids), request.sampling.max_tokens
    if tokens == 0 and (new > 0 or request.prompt_logprobs):
        raise RequestError(f"{param}: there are no tokens to continue", param=param, code="invalid_value")
    only_scored = new == 0 and request.prompt_logprobs
    if not (limits.fits(asked_of_engines(request)) if only_scored else tokens + new <= limits.positions):
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
