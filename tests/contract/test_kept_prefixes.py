"""The native engine keeps a conversation's cache between its turns: the same answers, each token once."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from letters import VOCABULARY, letters
from test_generation import (
    FAMILIES,
    ask,
    collect,
    collect_stream,
    joined,
    model,
    over_sleep,
    reference_logprobs,
    run,
    tokens,
)
from test_generation import request as plain_request

from tandem.generation.native import NativeEngine
from tandem.models.lean import make_lean
from tandem.types import Completion, Request

BOUND = 2e-5
TURNS, SAID, TOLD = 8, 6, 3
"""Of a conversation: turns of the policy, tokens of each, and tokens that it is told between them."""


def request(*token_ids: int, keep: bool = True, **options: Any) -> Request:
    return replace(plain_request(*token_ids, **options), keep=keep)


def native(family: str = "qwen2", max_running: int = 8, **options: Any) -> NativeEngine:
    loaded = model(family)
    make_lean(loaded)
    engine = NativeEngine(loaded, max_running=max_running, tokenizer=letters(), **options)
    engine.load_weights(0, None)
    return engine


def check(reference: Any, asked: Request, completions: Sequence[Completion]) -> None:
    """Log-probs are those of a plain forward pass over the whole row."""
    for completion in completions:
        expected = reference_logprobs(reference, asked, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=BOUND, rtol=0)


async def converse(
    engine: NativeEngine, opening: Sequence[int], seed: int, keep: bool = True, turns: int = TURNS, **sampling: Any
) -> list[tuple[Request, Completion]]:
    """What is told depends on the seed alone."""
    told = np.random.default_rng(seed).integers(0, VOCABULARY, (turns, TOLD)).tolist()
    row, found = list(opening), list[tuple[Request, Completion]]()
    for turn in range(turns):
        asked = request(*row, seeds=(100 * seed + turn,), max_tokens=SAID, keep=keep, **sampling)
        (completion,) = await collect(engine, asked)
        found.append((asked, completion))
        row += [*completion.token_ids.tolist(), *told[turn]]
    return found


def converse_all(engine: NativeEngine, keep: bool = True, **sampling: Any) -> list[tuple[Request, Completion]]:
    """Conversations that begin differently, alike, and with the beginning of another one; all at once."""
    openings = ([1, 2, 3], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9], [4, 5, 6], [9])

    async def together() -> list[list[tuple[Request, Completion]]]:
        asked = (converse(engine, opening, seed, keep, **sampling) for seed, opening in enumerate(openings))
        return await asyncio.gather(*asked)

    return [turn for conversation in run(together()) for turn in conversation]


@pytest.mark.parametrize("max_running", [2, 16])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_conversation_that_is_kept_has_the_log_probs_of_whole_rows(family: str, max_running: int) -> None:
    reference = model(family, attention="sdpa")
    kept, anew = (converse_all(native(family, max_running), keep, temperature=0.8) for keep in (True, False))
    for (asked, completion), (other, computed) in zip(kept, anew, strict=True):
        check(reference, asked, [completion])
        assert asked.token_ids.tolist() == other.token_ids.tolist()
        assert completion.token_ids.tolist() == computed.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, computed.logprobs, atol=BOUND, rtol=0)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_turns_are_the_same(family: str) -> None:
    kept, anew = (converse_all(native(family), keep, temperature=0.0) for keep in (True, False))
    assert [c.token_ids.tolist() for _, c in kept] == [c.token_ids.tolist() for _, c in anew]


def test_each_token_of_a_conversation_is_prefilled_once() -> None:
    kept, anew = native(), native()
    run(converse(kept, [1, 2, 3], seed=1))
    run(converse(anew, [1, 2, 3], seed=1, keep=False))
    assert kept.prefilled_tokens == 3 + (TURNS - 1) * (1 + TOLD), "what is told, and the last token of each turn"
    assert anew.prefilled_tokens == sum(3 + turn * (SAID + TOLD) for turn in range(TURNS))


def test_siblings_that_are_asked_one_by_one_share_their_opening_and_then_go_on_each_for_itself() -> None:
    engine, reference = native(max_running=16), model(attention="sdpa")

    async def together() -> list[list[tuple[Request, Completion]]]:
        return await asyncio.gather(*(converse(engine, [1, 2, 3, 4], seed, temperature=1.5) for seed in range(4)))

    for asked, completion in (turn for conversation in run(together()) for turn in conversation):
        check(reference, asked, [completion])
    assert engine.prefilled_tokens == 4 + 4 * (TURNS - 1) * (1 + TOLD), "the opening once"


def test_forks_siblings_and_shorter_beginnings_go_on_from_what_they_share() -> None:
    """Asked at once: several requests and seeds for one row, its beginning alone, and rows that leave it earlier."""
    engine, reference = native(max_running=16), model(attention="sdpa")
    opening = request(1, 2, 3, 4, 5, seeds=(1, 3), temperature=1.5)
    first, second = ask(engine, opening)[0]
    row, other = ([*opening.token_ids.tolist(), *completion.token_ids.tolist()] for completion in (first, second))
    assert row[5] != other[5]
    computed = engine.prefilled_tokens
    asked = (
        request(*row, 7, 8, seeds=(3, 4, 5)),
        request(*row, 7, 9, seeds=(6,)),
        request(*row, seeds=(7,), keep=False),
        request(*row[:9], seeds=(8,)),
        request(*row[:9], (row[9] + 1) % VOCABULARY, 3, seeds=(9, 10)),
        request(1, 2, 3, 4, seeds=(11,)),
        request(*other, 1, seeds=(12,)),
        request(2, 3, 4, seeds=(13,)),
    )
    answers = ask(engine, *asked)
    assert engine.prefilled_tokens - computed == 3 + 3 + 1 + 1 + 2 + 1 + 2 + 3
    fresh = ask(native(max_running=16), *asked)
    for one, completions, anew in zip(asked, answers, fresh, strict=True):
        check(reference, one, completions)
        assert tokens(completions) == tokens(anew)


def test_turns_that_end_at_once_are_kept_from_their_own_slots() -> None:
    """Each ends with the token that its prompt's pass chooses, beside rows that go on and are not kept."""
    engine, reference = native(), model(attention="sdpa")

    async def conversation() -> list[tuple[Request, Completion]]:
        row, found, others = [1, 2, 3], list[tuple[Request, Completion]](), list[asyncio.Task[Any]]()
        for told in range(4, 8):
            other = request(told, max_tokens=60, keep=False)
            others.append(asyncio.create_task(collect(engine, other)))
            await asyncio.sleep(0)  # it takes the slot before that of the turn
            asked = request(*row, max_tokens=1)
            (completion,) = await collect(engine, asked)
            found.append((asked, completion))
            row += [*completion.token_ids.tolist(), told]
        assert not any(other.done() for other in others)
        await asyncio.gather(*others)
        return found

    for asked, completion in run(conversation()):
        check(reference, asked, [completion])
    assert engine.prefilled_tokens == 4 + 3 + 3 * 2, "the others, the opening, and two tokens of each later turn"


def test_a_streamed_turn_is_kept_and_goes_on_from_what_is_kept() -> None:
    engine, asked = native(), request(1, 2, 3)
    whole = joined(run(collect_stream(engine, asked))[0])
    further = request(1, 2, 3, *whole.token_ids.tolist(), 5, seeds=(4,))
    ((plain,),) = ask(native(), further)
    assert joined(run(collect_stream(engine, further))[0]).token_ids.tolist() == plain.token_ids.tolist()
    assert engine.prefilled_tokens == 3 + 2


def test_a_short_beginning_that_costs_more_than_it_saves_is_computed_again() -> None:
    engine = native()
    ask(engine, request(1, 2, 3, 4, 5, max_tokens=1))
    ask(
        engine, request(1, 2, 3, 4, 5, *range(6, 22), max_tokens=1), request(1, 2, 3, 4, 5, *range(7, 22), max_tokens=1)
    )
    assert engine.prefilled_tokens == 5 + 21 + 15


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    engine, asked = native(), request(1, 2, 3)
    ((completion,),) = ask(engine, asked)
    scored = replace(request(1, 2, 3, *completion.token_ids.tolist(), 5), prompt_logprobs=True)
    ((found,),), ((wanted,),) = ask(engine, scored), ask(native(), scored)
    assert engine.prefilled_tokens == 3 + len(scored.token_ids)
    assert found.prompt is not None and wanted.prompt is not None
    np.testing.assert_array_equal(found.prompt.logprobs, wanted.prompt.logprobs)


@pytest.mark.parametrize("room", [0, 20, 60, 200])
def test_what_is_kept_is_bounded_and_what_was_used_longest_ago_goes_first(room: int) -> None:
    engine, reference = native(prefix_cache_tokens=room), model(attention="sdpa")
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, engine._prefixes.tokens)
            await asyncio.sleep(0)

    async def together() -> list[list[tuple[Request, Completion]]]:
        watching = asyncio.create_task(watch())
        found = await asyncio.gather(*(converse(engine, [seed, 1, 2], seed, temperature=0.8) for seed in range(6)))
        watching.cancel()
        return found

    for conversation in run(together()):
        for asked, completion in conversation:
            check(reference, asked, [completion])
    assert (most == 0) if room == 0 else (room / 2 < most <= room)


def test_the_row_used_longest_ago_goes_first() -> None:
    engine = native(prefix_cache_tokens=20)
    prompts = [range(10), range(10, 20), range(20, 25)]

    def computed(prompt: Sequence[int], *more: int, keep: bool) -> int:
        before = engine.prefilled_tokens
        ask(engine, request(*prompt, *more, max_tokens=1, keep=keep))
        return engine.prefilled_tokens - before

    assert [computed(prompt, keep=True) for prompt in prompts[:2]] == [10, 10]
    assert computed(prompts[0], 3, keep=False) == 1
    assert computed(prompts[2], keep=True) == 5
    assert [computed(prompt, 3, keep=False) for prompt in prompts] == [1, 11, 1]


def test_running_rows_have_precedence_over_kept_ones() -> None:
    """Two slots and sixteen conversations: each is answered, whatever is kept."""
    engine, reference = native(max_running=2), model(attention="sdpa")

    async def together() -> list[list[tuple[Request, Completion]]]:
        return await asyncio.gather(*(converse(engine, [seed, 1], seed, turns=3) for seed in range(16)))

    for asked, completion in (turn for conversation in run(together()) for turn in conversation):
        check(reference, asked, [completion])


@pytest.mark.parametrize("given", [False, True], ids=["in place", "given"])
def test_after_a_publish_nothing_is_kept_that_other_weights_computed(given: bool) -> None:
    """Neither what had ended before nor rows that were under way; the same version's weights may be others too."""
    served, other = model(), model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    engine = NativeEngine(served, max_running=4)
    engine.load_weights(0, None)
    opening, long = request(1, 2, 3), request(6, 5, seeds=(0, 1), max_tokens=30)

    async def publish_halfway() -> list[list[Completion]]:
        ended = await collect(engine, opening)
        under_way = asyncio.create_task(collect(engine, long))
        for _ in range(9):
            await asyncio.sleep(0)
        if not given:
            served.load_state_dict(other.state_dict())
        engine.load_weights(0, other.named_parameters() if given else None)
        return [ended, await under_way]

    further = [
        request(*asked.token_ids.tolist(), *completion.token_ids.tolist(), 4)
        for asked, completions in zip((opening, long), run(publish_halfway()), strict=True)
        for completion in completions
    ]
    reference = model(attention="sdpa")
    reference.load_state_dict(other.state_dict())
    for again in (False, True):
        computed = engine.prefilled_tokens
        for asked, completions in zip(further, ask(engine, *further), strict=True):
            check(reference, asked, completions)
        assert engine.prefilled_tokens - computed == (3 if again else sum(len(one.token_ids) for one in further))


def test_sleep_and_failures_leave_nothing() -> None:
    served = model()
    engine = NativeEngine(served, max_running=4)
    engine.load_weights(0, None)
    asked = request(1, 2, 3)
    ask(engine, asked)
    assert engine._prefixes.tokens == 3 + 12 - 1
    engine.sleep()
    assert engine._prefixes.tokens == 0
    engine.wake()
    ask(engine, asked)
    norm: torch.Tensor = served.get_parameter("model.norm.weight")
    with torch.no_grad():
        norm.fill_(float("nan"))
    with pytest.raises(Exception, match="not finite"):
        ask(engine, asked)
    assert engine._prefixes.tokens == 0


def test_a_turn_that_sleeps_cut_is_kept_in_the_end() -> None:
    engine, opening = native(), request(1, 2, 3, max_tokens=20)
    ((interrupted,),) = run(over_sleep(engine, [opening], [5, 4]))
    assert tokens([interrupted]) == tokens(ask(native(), opening)[0])
    computed = engine.prefilled_tokens
    further = request(1, 2, 3, *interrupted.token_ids.tolist(), 4, seeds=(3,))
    check(model(attention="sdpa"), further, ask(engine, further)[0])
    assert engine.prefilled_tokens - computed == 2


def test_recorded_steps_go_on_from_what_is_kept() -> None:
    plain, recorded = (converse_all(native("qwen3", record=record)) for record in (False, True))
    for (asked, completion), (_, other) in zip(plain, recorded, strict=True):
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        check(model("qwen3", attention="sdpa"), asked, [other])
