"""Prompt -> trajectories of one turn: ask once, take the answers."""

import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from tandem.types import Completion, IntArray, Prompt, Request, SamplingParams, Trajectory, Turn

Generate = Callable[[Request], AsyncIterator[Completion]]
DecodeAll = Callable[[list[IntArray]], list[str]]


async def single_turn(
    prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams, generate: Generate, decode: DecodeAll
) -> list[Trajectory]:
    """A trajectory for each seed, in their order."""
    start = time.perf_counter()
    request = Request(prompt.token_ids, sampling, tuple(seeds), pictures=prompt.pictures)
    answers = [(completion, time.perf_counter() - start) async for completion in generate(request)]
    answers.sort(key=lambda pair: pair[0].sample)
    texts = decode([completion.token_ids for completion, _ in answers])
    return [
        _trajectory(prompt, completion, seconds, text)
        for (completion, seconds), text in zip(answers, texts, strict=True)
    ]


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
