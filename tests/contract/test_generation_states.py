"""The native engine on models with state mixers: what it draws and how it scores it are transformers' own."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.generation.native import NativeEngine
from tandem.types import Completion, IntArray, Request, SamplingParams
from tests.state_models import FAMILIES, OFTEN, pair_of

BOUND = 1e-4
LENGTHS, TOKENS = (7, 3, 70, 1, 11, 68), (13, 20, 5, 17, 9, 11)
"""Of prompts, two longer than a chunk of any mixer, and what is generated from each: rows join, leave and move."""


def prompts(model: Any, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[IntArray]:
    random, vocabulary = np.random.default_rng(seed), model.config.get_text_config().vocab_size
    return [random.integers(3, vocabulary, length).astype(np.int32) for length in lengths]


def engine_of(model: Any, max_running: int = 5, **options: Any) -> NativeEngine:
    engine = NativeEngine(model, max_running=max_running, **options)
    engine.load_weights(0, None)
    return engine


async def ask(
    engine: NativeEngine, prompt: IntArray, tokens: int, temperature: float = 1.0, samples: int = 1, keep: bool = False
) -> list[Completion]:
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature)
    request = Request(prompt, sampling, tuple(range(samples)), keep=keep)
    return [completion async for completion in engine.generate(request)]


@torch.no_grad()
def check(eager: Any, prompt: IntArray, completion: Completion, temperature: float = 1.0) -> None:
    """Log-probs are those of one forward pass of transformers over the whole row; greedy tokens are its best ones."""
    row = torch.from_numpy(np.concatenate((prompt, completion.token_ids))).long()
    logits = eager(row[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    wanted = (logits / (temperature or 1)).log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, wanted.numpy(), rtol=0, atol=BOUND)
    if not temperature:
        assert logits.argmax(-1).tolist() == completion.token_ids.tolist()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_join_leave_and_share_are_scored_as_alone(family: str, paged: bool) -> None:
    """Prompts of many lengths, siblings of one that stay alike for a while, greedy and drawn, more than there is room
    for."""
    eager, ours = pair_of(family)
    engine, asked = engine_of(ours, record=paged), prompts(ours)
    kinds = [(prompt, count, 0.0, 1) for prompt, count in zip(asked, TOKENS, strict=True)]
    kinds += [(asked[0], 12, 0.7, 4), (asked[2], 8, 0.1, 3)]

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(ask(engine, *kind) for kind in kinds))

    for (prompt, _, temperature, _), completions in zip(kinds, asyncio.run(together()), strict=True):
        for completion in completions:
            check(eager, prompt, completion, temperature)


@pytest.mark.parametrize("family", OFTEN)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    eager, ours = pair_of(family)
    engine = engine_of(ours)
    for prompt, count in zip(prompts(ours), TOKENS, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        how = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": None}
        wanted = eager.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :]
        (found,) = asyncio.run(ask(engine, prompt, count, 0.0))
        assert found.token_ids.tolist() == wanted.tolist()


async def converse(engine: NativeEngine, opening: IntArray, turns: int = 3) -> list[tuple[IntArray, Completion]]:
    """Turns that go on from one another, two tokens told between them."""
    row, found = opening, list[tuple[IntArray, Completion]]()
    for _ in range(turns):
        (completion,) = await ask(engine, row, 6, 0.5, keep=True)
        found.append((row, completion))
        row = np.concatenate((row, completion.token_ids, np.array([5, 9], dtype=np.int32)))
    return found


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_go_on_from_the_states_that_the_last_one_left(family: str, paged: bool) -> None:
    eager, ours = pair_of(family)
    engine, openings = engine_of(ours, record=paged), prompts(ours, (70, 4))

    async def together() -> list[list[tuple[IntArray, Completion]]]:
        return await asyncio.gather(*(converse(engine, opening) for opening in openings))

    for conversation in asyncio.run(together()):
        for row, completion in conversation:
            check(eager, row, completion, 0.5)
    assert engine.prefilled_tokens == 74 + 2 * 2 * 3, "openings, then what is told and the last token of each turn"


@pytest.mark.parametrize("family", OFTEN)
def test_a_fork_from_an_earlier_turn_is_computed_anew(family: str) -> None:
    """The last turn's snapshot has taken the place of that one's."""
    eager, ours = pair_of(family)
    engine, (opening,) = engine_of(ours), prompts(ours, (9,))
    (first, said), *_ = asyncio.run(converse(engine, opening))
    computed = engine.prefilled_tokens
    fork = np.concatenate((first, said.token_ids, np.array([7, 7], dtype=np.int32)))
    (found,) = asyncio.run(ask(engine, fork, 5))
    check(eager, fork, found)
    assert engine.prefilled_tokens == computed + len(fork)


def test_snapshots_take_room() -> None:
    """One counts as the tokens whose keys and values are as large, so none is kept where no row with it has room."""
    _, ours = pair_of("nemotron_h")
    engine, (opening,) = engine_of(ours), prompts(ours, (9,))
    asyncio.run(converse(engine, opening, turns=1))
    states, cache = engine._cache.states, engine._cache
    (layer,) = cache._layers.values()
    token_bytes = sum(x[0, ..., 0].nbytes for x in layer)
    assert states.row_bytes == sum(x[0].nbytes for state in states._of.values() for x in state) > 10 * token_bytes
    assert engine._prefixes.tokens == 9 + 5 + -(-states.row_bytes // token_bytes)
    small = engine_of(ours, prefix_cache_tokens=57)
    asyncio.run(converse(small, opening))
    assert small._prefixes.tokens == 0


def test_a_prompts_own_log_probs_are_computed_whole() -> None:
    eager, ours = pair_of("nemotron_h")
    engine, (opening,) = engine_of(ours), prompts(ours, (70,))
    ((row, said),) = asyncio.run(converse(engine, opening, turns=1))
    longer = np.concatenate((row, said.token_ids, np.array([5], dtype=np.int32)))
    request = Request(longer, SamplingParams(max_tokens=3), (0,), prompt_logprobs=True)

    async def scored() -> Completion:
        (found,) = [completion async for completion in engine.generate(request)]
        return found

    found, ids = asyncio.run(scored()), torch.from_numpy(longer).long()
    check(eager, longer, found)
    with torch.no_grad():
        wanted = eager(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert found.prompt is not None
    np.testing.assert_allclose(found.prompt.logprobs, wanted.numpy(), rtol=0, atol=BOUND)


@pytest.mark.parametrize("family", OFTEN)
def test_a_publish_forgets_the_states_that_older_weights_have_left(family: str) -> None:
    eager, ours = pair_of(family)
    engine, (opening,) = engine_of(ours), prompts(ours, (70,))
    ((row, said),) = asyncio.run(converse(engine, opening, turns=1))
    new = [(name, weight * 1.1) for name, weight in ours.named_parameters()]
    with torch.no_grad():
        engine.load_weights(1, new)
        for (_, weight), parameter in zip(new, eager.parameters(), strict=True):
            parameter.copy_(weight)
    longer = np.concatenate((row, said.token_ids, np.array([5], dtype=np.int32)))
    (found,) = asyncio.run(ask(engine, longer, 4))
    check(eager, longer, found)
    assert found.versions.tolist() == [1] * 4
