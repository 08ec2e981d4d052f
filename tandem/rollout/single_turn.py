"""Prompts -> trajectories of one turn: ask once, take the answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from tandem.types import Completion, IntArray, Prompt, Request, SamplingParams, Trajectory, Turn

Generate = Callable[[Request], AsyncIterator[Completion]]
DecodeAll = Callable[[list[IntArray]], list[str]]


async def single_turn(
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    sampling: SamplingParams,
    generate: Generate,
    decode: DecodeAll,
) -> list[list[Trajectory]]:
    """For each prompt `len(seeds[i])` trajectories, in the order of the seeds; all requests are in flight together."""
    answers = await asyncio.gather(
        *(_ask(prompt, tuple(own), sampling, generate) for prompt, own in zip(prompts, seeds, strict=True))
    )
    texts = iter(decode([completion.token_ids for answer in answers for completion, _ in answer]))
    return [
        [_trajectory(prompt, completion, seconds, next(texts)) for completion, seconds in answer]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


async def _ask(
    prompt: Prompt, seeds: tuple[int, ...], sampling: SamplingParams, generate: Generate
) -> list[tuple[Completion, float]]:
    start = time.perf_counter()
    request = Request(prompt.token_ids, sampling, seeds)
    answer = [(completion, time.perf_counter() - start) async for completion in generate(request)]
    return sorted(answer, key=lambda pair: pair[0].sample)


def _trajectory(prompt: Prompt, completion: Completion, seconds: float, text: str) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        sample=completion.sample,
        response_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
        rollout_logprobs=completion.logprobs,
        versions=completion.versions,
        text=text,
        status=completion.status,
        turns=(Turn("policy", len(completion.token_ids)),),
        generation_s=seconds,
        experts=completion.experts,
    )
