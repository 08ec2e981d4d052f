"""What every GenerationEngine promises: one suite, run on each engine and on the fake."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from letters import POSITIONS, VOCABULARY, letters
from short_runs import ShortRuns
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.errors import EngineError, UserError
from tandem.generation.base import GenerationEngine
from tandem.generation.fake import FakeEngine
from tandem.generation.native import Asked, NativeEngine
from tandem.generation.native_sample import NativeSample
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.resumable import ResumableGeneration
from tandem.models.attention import ATTENTION
from tandem.models.fused import Fused
from tandem.models.lean import make_lean
from tandem.types import Completion, Delta, Request, SamplingParams, Status, TopLogprobs

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "qwen2-windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "mistral": (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 7, "head_dim": 8}),
}
WINDOWS = ("qwen2-windows", "mistral")
"""With sliding windows: Qwen2's in the second layer alone, and fused; Mistral's in both, and not fused."""

Result = TypeVar("Result")


def model(family: str = "qwen2", attention: str = ATTENTION, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config_class, model_class, special = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attention,
        **special,
    )
    return model_class(config).to(dtype).eval()


def native(max_running: int = 4, family: str = "qwen2", dtype: torch.dtype = torch.float32) -> NativeEngine:
    """On a model as it is loaded."""
    loaded = model(family, dtype=dtype)
    make_lean(loaded)
    engine = NativeEngine(loaded, max_running=max_running, tokenizer=letters())
    engine.load_weights(0, None)
    return engine


def fake() -> FakeEngine:
    chain = torch.linspace(-2, 2, VOCABULARY).repeat(VOCABULARY, 1)
    engine = FakeEngine(chain, tokenizer=letters(), max_tokens=POSITIONS)
    engine.load_weights(0, None)
    return engine


Make = Callable[[], GenerationEngine]


@pytest.fixture(params=[native, fake, "vllm"], ids=lambda made: made if isinstance(made, str) else made.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine at version 0; vLLM's is always the same one."""
    if request.param != "vllm":
        return request.param
    engine: GenerationEngine = request.getfixturevalue("vllm_engine")

    def again() -> GenerationEngine:
        engine.wake()
        engine.load_weights(0, None)
        return engine

    return again


def request(*tokens: int, seeds: Sequence[int] = (0,), **sampling: Any) -> Request:
    sampling = {"max_tokens": 12, **sampling}
    return Request(np.array(tokens, dtype=np.int32), SamplingParams(**sampling), tuple(seeds))


async def collect(engine: GenerationEngine | ResumableGeneration, asked: Request) -> list[Completion]:
    return sorted([completion async for completion in engine.generate(asked)], key=lambda c: c.sample)


def run(awaitable: Awaitable[Result]) -> Result:
    async def main() -> Result:
        return await asyncio.wait_for(awaitable, timeout=600)

    return asyncio.run(main())


def ask(engine: GenerationEngine, *asked: Request) -> list[list[Completion]]:
    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(collect(engine, one) for one in asked))

    return run(together())


async def collect_stream(engine: GenerationEngine, asked: Request) -> list[list[Delta]]:
    """The deltas of each sample, in the order in which they came."""
    deltas: list[list[Delta]] = [[] for _ in asked.seeds]
    async for delta in engine.stream(asked):
        deltas[delta.sample].append(delta)
    return deltas


def joined(deltas: Sequence[Delta]) -> Completion:
    """What the deltas of a sample come to; only the last of them has a status."""
    assert [delta.status for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    status = deltas[-1].status
    assert status is not None
    columns = ([getattr(delta, name) for delta in deltas] for name in ("token_ids", "logprobs", "versions"))
    tops = [delta.top for delta in deltas if delta.top is not None]
    top = (tops and TopLogprobs(*(np.concatenate([getattr(one, name) for one in tops]) for name in TOP))) or None
    assert all(delta.prompt is None for delta in deltas[1:])
    whole = (np.concatenate(column) for column in columns)
    return Completion(deltas[0].sample, *whole, status, top=top, prompt=deltas[0].prompt)  # type: ignore[arg-type]


TOP = ("token_ids", "logprobs")


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


MIXED = (
    request(1, 2, 3, seeds=(5, 6, 7)),
    request(4, seeds=(8,), max_tokens=3),
    request(*range(10, 22), seeds=(9, 10), max_tokens=20, temperature=0.7),
    request(3, 3, 3, 3, seeds=(11, 12), top_k=5),
    request(25, 1, seeds=(13,), top_p=0.8, temperature=1.3),
    request(2, 1, seeds=(14, 15), temperature=0.0),
)


def test_every_sample_comes_once_and_whole(make: Make) -> None:
    for asked, completions in zip(MIXED, ask(make(), *MIXED), strict=True):
        assert [completion.sample for completion in completions] == list(range(len(asked.seeds)))
        for completion in completions:
            assert completion.status is Status.TRUNCATED
            assert len(completion.token_ids) == len(completion.logprobs) == asked.sampling.max_tokens
            assert completion.token_ids.dtype == completion.versions.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert (completion.logprobs <= 0).all() and (completion.versions == 0).all()


def test_a_seed_gives_its_tokens_whatever_else_is_asked(make: Make) -> None:
    together = [tokens(completions) for completions in ask(make(), *MIXED)]
    backwards = [tokens(completions) for completions in ask(make(), *reversed(MIXED))]
    alone = [tokens(ask(make(), one)[0]) for one in MIXED]
    assert together == alone == backwards[::-1]
    others = tokens(ask(make(), request(1, 2, 3, seeds=(15, 16, 17)))[0])
    assert all(a != b for a, b in zip(others, together[0], strict=True))


def test_greedy_has_one_answer_and_the_logprob_of_temperature_one(make: Make) -> None:
    engine = make()
    greedy, sampled = ask(engine, request(1, 2, seeds=(1, 2), temperature=0.0), request(1, 2, seeds=range(40)))
    assert tokens(greedy)[0] == tokens(greedy)[1]
    first = [c for c in sampled if c.token_ids[0] == greedy[0].token_ids[0]]
    assert first and first[0].logprobs[0] == pytest.approx(greedy[0].logprobs[0], abs=1e-6)
    assert all(c.logprobs[0] <= greedy[0].logprobs[0] for c in sampled)


def test_stop_tokens_end_a_sample_and_belong_to_it(make: Make) -> None:
    engine = make()
    (free,) = ask(engine, request(1, 2, seeds=range(8)))
    stop = (int(free[0].token_ids[4]), int(free[1].token_ids[2]))
    (stopped,) = ask(engine, request(1, 2, seeds=range(8), stop_token_ids=stop))
    assert tokens(ask(engine, request(1, 2, seeds=range(8)))[0]) == tokens(free)
    for before, after in zip(tokens(free), stopped, strict=True):
        ends = [place for place, token in enumerate(before) if token in stop]
        assert after.token_ids.tolist() == before[: ends[0] + 1 if ends else None]
        assert after.status is (Status.COMPLETED if ends else Status.TRUNCATED)
    assert stopped[0].status is Status.COMPLETED and len(stopped[0].token_ids) <= 5


def test_stop_strings_end_a_sample_at_the_token_that_completes_them(make: Make) -> None:
    (free,) = ask(make(), request(1, 2, seeds=range(4), max_tokens=40))
    texts = ["".join(chr(97 + token) for token in row) for row in tokens(free)]
    strings = (texts[0][20:23], texts[1][7:9])
    plain = request(4, seeds=(3,))
    stopped, untouched = ask(make(), request(1, 2, seeds=range(4), max_tokens=40, stop_strings=strings), plain)
    for text, after in zip(texts, stopped, strict=True):
        ends = [text.find(string) + len(string) for string in strings if string in text]
        assert "".join(chr(97 + token) for token in after.token_ids) == (text[: min(ends)] if ends else text)
        assert after.status is (Status.COMPLETED if ends else Status.TRUNCATED)
    assert stopped[0].status is Status.COMPLETED and untouched[0].status is Status.TRUNCATED


def test_a_stop_string_may_be_the_text_of_a_special_token(make: Make) -> None:
    engine = make()
    (free,) = ask(engine, request(1, 2, seeds=range(12), max_tokens=60))
    (stopped,) = ask(engine, request(1, 2, seeds=range(12), max_tokens=60, stop_strings=("z",)))
    assert any(25 in row for row in tokens(free))
    for before, after in zip(tokens(free), stopped, strict=True):
        assert after.token_ids.tolist() == (before[: before.index(25) + 1] if 25 in before else before)


def test_a_stream_is_the_completion_in_parts(make: Make) -> None:
    """Whatever else is asked, streamed or not; with stop tokens and stop strings as well."""
    engine = make()
    (free,) = ask(engine, request(1, 2, seeds=range(4), max_tokens=40))
    texts = ["".join(chr(97 + token) for token in row) for row in tokens(free)]
    stops = (
        request(1, 2, seeds=range(4), max_tokens=40, stop_token_ids=(int(free[0].token_ids[9]),)),
        request(1, 2, seeds=range(4), max_tokens=40, stop_strings=(texts[0][20:23], texts[1][7:9])),
    )
    asked = (*MIXED, *stops)
    completions = ask(engine, *asked)

    async def together() -> list[list[list[Delta]]]:
        streams = [collect_stream(engine, one) for one in asked]
        plain = [collect(engine, one) for one in MIXED]
        return (await asyncio.gather(*streams, *plain))[: len(asked)]  # type: ignore[return-value]

    for one, whole, deltas in zip(asked, completions, run(together()), strict=True):
        assert len(deltas) == len(one.seeds)
        for completion, own in zip(whole, deltas, strict=True):
            parts = joined(own)
            assert (parts.sample, parts.status) == (completion.sample, completion.status)
            assert parts.token_ids.tolist() == completion.token_ids.tolist()
            assert parts.versions.tolist() == completion.versions.tolist()
            np.testing.assert_allclose(parts.logprobs, completion.logprobs, atol=2e-5, rtol=0)
            assert len(own) > len(completion.token_ids) // 2, "tokens come as they are made"


def test_the_most_probable_tokens_come_where_they_are_wanted(make: Make) -> None:
    engine = make()
    plain = request(1, 2, seeds=(1, 2), temperature=0.7, top_k=4)
    wanted, greedy = replace(plain, top_logprobs=3), replace(request(3, temperature=0.0), top_logprobs=1)
    without, completions, (best,) = ask(engine, plain, wanted, greedy)
    streamed = [joined(own) for own in run(collect_stream(engine, wanted))]
    assert all(completion.top is None for completion in without)
    for before, completion, stream in zip(without, completions, streamed, strict=True):
        assert completion.token_ids.tolist() == before.token_ids.tolist() == stream.token_ids.tolist()
        top = completion.top
        assert top is not None and top.token_ids.shape == top.logprobs.shape == (12, 3)
        assert top.token_ids.dtype == np.int32 and top.logprobs.dtype == np.float32
        assert (np.diff(top.logprobs) <= 0).all() and (np.exp(top.logprobs).sum(axis=1) < 1 + 1e-5).all()
        same = top.token_ids == completion.token_ids[:, None]
        np.testing.assert_allclose(top.logprobs[same], completion.logprobs[same.any(axis=1)], atol=1e-5, rtol=0)
        assert (completion.logprobs <= top.logprobs[:, 0] + 1e-5).all() and same.any()
        assert stream.top is not None and stream.top.token_ids.tolist() == top.token_ids.tolist()
        np.testing.assert_allclose(stream.top.logprobs, top.logprobs, atol=2e-5, rtol=0)
    assert best.top is not None and best.top.token_ids[:, 0].tolist() == best.token_ids.tolist()
    np.testing.assert_allclose(best.top.logprobs[:, 0], best.logprobs, atol=1e-5, rtol=0)


def test_a_prompts_log_probs_are_those_that_it_would_have_as_an_answer(make: Make) -> None:
    """Greedy answers have log-probs of temperature 1, as prompts have; asked among others, streamed or not."""
    engine = make()
    ((answer,),) = ask(engine, replace(request(4, 2, temperature=0.0, max_tokens=30), top_logprobs=2))
    ids = [4, 2, *answer.token_ids.tolist()]
    scored = replace(request(*ids, seeds=(1, 2), temperature=0.5, max_tokens=1), prompt_logprobs=True, top_logprobs=2)
    single = replace(request(4), prompt_logprobs=True)  # nothing predicts its only token
    plain, found, (alone,), (ranked,) = ask(engine, MIXED[0], scored, single, replace(single, top_logprobs=2))
    found += [joined(own) for own in run(collect_stream(engine, scored))]
    assert all(completion.prompt is None for completion in plain)
    assert alone.prompt is not None and alone.prompt.top is None and alone.prompt.logprobs.shape == (0,)
    assert ranked.prompt is not None and ranked.prompt.logprobs.shape == (0,)
    assert ranked.prompt.top is None or len(ranked.prompt.top.token_ids) == 0
    for completion in found:
        prompt, top = completion.prompt, completion.prompt and completion.prompt.top
        assert prompt is not None and top is not None and answer.top is not None
        assert prompt.logprobs.dtype == np.float32 and len(prompt.logprobs) == len(top.token_ids) == 31
        np.testing.assert_allclose(prompt.logprobs[1:], answer.logprobs, atol=2e-5, rtol=0)
        np.testing.assert_allclose(top.logprobs[1:], answer.top.logprobs, atol=2e-5, rtol=0)
        assert top.token_ids[1:, 0].tolist() == answer.token_ids.tolist()


def test_a_stream_ends_with_abort_and_tells_nothing_twice(make: Make, short_runs: ShortRuns) -> None:
    engine = make()
    asked = request(1, 2, seeds=range(6), max_tokens=90)  # more than the native engine runs at once
    whole = tokens(ask(engine, asked)[0])

    async def abort_halfway() -> list[list[Delta]]:
        deltas: list[list[Delta]] = [[] for _ in asked.seeds]
        with short_runs:
            async for delta in engine.stream(asked):
                deltas[delta.sample].append(delta)
                if sum(map(len, deltas)) == 20:
                    engine.abort()
        return deltas

    completions = [joined(own) for own in run(abort_halfway())]
    assert {completion.status for completion in completions} == {Status.ABORTED}
    assert 0 < max(len(completion.token_ids) for completion in completions) < 90
    for completion, row in zip(completions, whole, strict=True):
        assert completion.token_ids.tolist() == row[: len(completion.token_ids)]
    assert tokens(ask(engine, MIXED[0])[0]) == tokens(ask(make(), MIXED[0])[0])


def test_a_stream_is_refused_as_a_request_is(make: Make) -> None:
    engine = make()
    for asked in (request(1, VOCABULARY), request(*[1] * 90, max_tokens=7)):
        with pytest.raises(UserError):
            run(collect_stream(engine, asked))


def test_every_token_carries_the_version_that_made_it(make: Make, short_runs: ShortRuns) -> None:
    engine = make()

    async def update_halfway() -> list[Completion]:
        with short_runs:
            first = asyncio.create_task(collect(engine, request(3, max_tokens=5)))
            answer = asyncio.create_task(collect(engine, request(1, 2, seeds=(0,), max_tokens=90)))
            await first
            engine.load_weights(7, None)
        return await answer

    (completion,) = run(update_halfway())
    assert engine.version == 7
    assert set(completion.versions.tolist()) == {0, 7}
    assert (np.diff(completion.versions) >= 0).all()


def test_abort_ends_what_runs_and_what_waits(make: Make, short_runs: ShortRuns) -> None:
    engine = make()

    async def abort_halfway() -> list[list[Completion]]:
        asked = [request(place, seeds=range(3), max_tokens=90) for place in range(4)]
        asked.insert(1, request(5, max_tokens=4))  # ends early, and by then the three rows before it have begun
        with short_runs:
            answers = [asyncio.create_task(collect(engine, one)) for one in asked]
            await answers.pop(1)
            engine.abort()
            return await asyncio.gather(*answers)

    completions = [completion for answer in run(abort_halfway()) for completion in answer]
    assert len(completions) == 12
    assert {completion.status for completion in completions} == {Status.ABORTED}
    assert 0 < max(len(completion.token_ids) for completion in completions) < 90
    assert all(len(c.token_ids) == len(c.logprobs) == len(c.versions) for c in completions)
    assert tokens(ask(engine, MIXED[0])[0]) == tokens(ask(make(), MIXED[0])[0])


async def over_sleep(
    engine: GenerationEngine, asked: Sequence[Request], turns: Sequence[int], turn_s: float = 0.0
) -> list[list[Completion]]:
    """The engine sleeps after each number of `turns` of the event loop, with whatever is under way then."""
    generation = ResumableGeneration(engine, letters())
    answers = [asyncio.create_task(collect(generation, one)) for one in asked]
    for count in turns:
        for _ in range(count):
            await asyncio.sleep(turn_s)
        generation.pause()
        for _ in range(3):
            await asyncio.sleep(0)
        generation.resume()
    completions = await asyncio.gather(*answers)
    assert generation.unfinished == 0
    return completions


SEAMS = ([1], [5, 1, 7], [2] * 15)


@pytest.mark.parametrize("turns", SEAMS, ids=str)
@pytest.mark.parametrize("make", [partial(native, 4), partial(native, 64), fake], ids=["waiting", "running", "fake"])
def test_what_a_sleep_interrupts_goes_on_as_if_nothing_had_been(make: Make, turns: list[int]) -> None:
    """The same tokens of the same seeds, also where a stop token or a stop string ends them."""
    (free,) = ask(make(), request(1, 2, seeds=range(4), max_tokens=40))
    texts = ["".join(chr(97 + token) for token in row) for row in tokens(free)]
    filtered = request(6, 5, seeds=range(3), max_tokens=30, top_k=6, top_p=0.9)
    by_id = request(1, 2, seeds=range(4), max_tokens=40, stop_token_ids=(int(free[0].token_ids[9]),))
    strings = tuple(text[place : place + 3] for text, place in zip(texts, (8, 11, 14, 21), strict=True))
    asked = (*MIXED, filtered, by_id, request(1, 2, seeds=range(4), max_tokens=40, stop_strings=strings))
    whole = ask(make(), *asked)
    for before, after in zip(whole, run(over_sleep(make(), asked, turns)), strict=True):
        assert tokens(after) == tokens(before)
        for one, other in zip(before, after, strict=True):
            assert (other.sample, other.status) == (one.sample, one.status)
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=4e-5, rtol=0)
            assert len(other.versions) == len(other.token_ids) and other.logprobs.dtype == np.float32


def test_stop_strings_are_seen_over_the_seam_of_a_sleep(make: Make) -> None:
    """Greedy, whose answers every engine continues alike; strings of nine tokens, which sleeps cut somewhere."""
    engine = make()
    asked = [request(place, 2, temperature=0.0, max_tokens=70) for place in range(8)]
    free = ["".join(chr(97 + token) for token in row) for (row,) in map(tokens, ask(engine, *asked))]
    asked = [
        replace(one, sampling=replace(one.sampling, stop_strings=(text[start : start + 9],)))
        for one, text, start in zip(asked, free, range(10, 50, 5), strict=True)
    ]
    turn_s = 0.004 if isinstance(engine, ReplicatedEngine) else 0.0
    whole = ask(engine, *asked)
    for turns in ([6] * 9, [4] * 20):
        interrupted = run(over_sleep(engine, asked, turns, turn_s))
        assert [tokens(one) for one in interrupted] == [tokens(one) for one in whole]
        assert {one.status for (one,) in interrupted} == {Status.COMPLETED}


class NewTextAlone(NativeEngine):
    """An engine whose stop strings are looked for in the text of new tokens alone, as in those of others."""

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        return super().generate(replace(request, made=0))


def test_an_engine_that_sees_new_text_alone_is_cut_at_the_stop_string() -> None:
    def make() -> NativeEngine:
        engine = NewTextAlone(model(), max_running=4, tokenizer=letters())
        engine.load_weights(0, None)
        return engine

    test_stop_strings_are_seen_over_the_seam_of_a_sleep(make)


def test_an_abort_that_nobody_continues_stays_one_and_a_full_answer_is_truncated() -> None:
    engine = native()
    generation = ResumableGeneration(engine, None)

    async def abort() -> list[Completion]:
        answer = asyncio.create_task(collect(generation, request(1, seeds=(1, 2), max_tokens=60)))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.abort()
        return await answer

    assert {completion.status for completion in run(abort())} == {Status.ABORTED}
    (full,) = ask(engine, request(1, max_tokens=3))[0]
    left = run(generation._continue(request(1, max_tokens=3), replace(full, status=Status.ABORTED)))
    assert left.status is Status.TRUNCATED and left.token_ids.tolist() == full.token_ids.tolist()


def test_experts_of_a_continued_answer_are_those_of_the_pass_that_made_each_token() -> None:
    """`[prompt and response but for the last token, layers, top_k]`; the number of the pass stands for the experts."""

    class Routed(NativeEngine):
        passes = 0

        async def generate(self, request: Request) -> AsyncIterator[Completion]:
            self.passes += 1
            async for completion in super().generate(request):
                positions = len(request.token_ids) + len(completion.token_ids) - 1
                yield replace(completion, experts=np.full((positions, 2, 1), self.passes, dtype=np.int32))

    engine = Routed(model(), max_running=4)
    engine.load_weights(0, None)
    ((completion,),) = run(over_sleep(engine, [request(1, 2, 3, max_tokens=12)], [5]))
    assert completion.experts is not None and completion.experts.shape == (14, 2, 1)
    first = int((completion.experts[:, 0, 0] == 1).sum())
    assert 3 < first < 12 and completion.experts[:, 0, 0].tolist() == [1] * first + [2] * (14 - first)


def test_a_continuation_draws_other_random_numbers_than_its_beginning() -> None:
    begun = request(1, seeds=(7, 2**70 + 3, -5))
    seeds = {replace(begun, made=made).seed(sample) for made in range(50) for sample in range(3)}
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)
    assert begun.seed(0) == 7


def test_sleep_waits_for_nobody_and_wake_undoes_it(make: Make) -> None:
    engine = make()

    async def sleep_while_running() -> None:
        answer = asyncio.create_task(collect(engine, request(1, seeds=(1, 2))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="await or abort"):
            engine.sleep()
        await answer
        engine.sleep()
        engine.sleep()

    run(sleep_while_running())
    with pytest.raises(EngineError, match="wake"):
        ask(engine, MIXED[0])
    engine.wake()
    engine.wake()
    assert tokens(ask(engine, MIXED[0])[0]) == tokens(ask(make(), MIXED[0])[0])


def test_a_closed_engine_answers_no_more() -> None:  # vLLM's is closed by its fixture, with the same words
    for engine in (native(), fake()):
        engine.close()
        with pytest.raises(EngineError):
            ask(engine, MIXED[0])


def test_impossible_requests_are_refused_before_the_first_sample(make: Make) -> None:
    engine = make()
    for asked, reason in (
        (request(*[1] * 90, max_tokens=7), "90 prompt tokens and 7 new ones; .* has 96 positions"),
        (request(), "0 prompt tokens"),
        (request(1, max_tokens=0), "0 new ones"),
    ):
        with pytest.raises(UserError, match=reason):
            ask(engine, asked)
    assert len(ask(engine, request(*[1] * 90, max_tokens=6))[0][0].token_ids) == 6
    assert ask(engine, request(1, seeds=())) == [[]]


def test_a_token_id_outside_the_vocabulary_is_the_fault_of_its_request_alone(make: Make) -> None:
    engine = make()
    sound = [request(place, 2, seeds=(place,)) for place in range(4)]
    wrong = [(1, VOCABULARY), (-1,), (1, 2, 2**31 - 1), (-(2**31), 3)]

    async def together() -> list[object]:
        asked = [item for pair in zip(sound, (request(*ids) for ids in wrong), strict=True) for item in pair]
        return await asyncio.gather(*(collect(engine, one) for one in asked), return_exceptions=True)

    answers = run(together())
    for ids, error in zip(wrong, answers[1::2], strict=True):
        place, token = next((place, token) for place, token in enumerate(ids) if not 0 <= token < VOCABULARY)
        assert isinstance(error, UserError), error
        assert f"token id {token} at position {place} of the prompt" in str(error)
        assert f"0 … {VOCABULARY - 1}" in str(error)
    assert [tokens(answer) for answer in answers[::2]] == [tokens(ask(engine, one)[0]) for one in sound]  # type: ignore


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (1e-45, 0.005, -1.0, float("nan"), float("inf"))),
        *(("top_p", value) for value in (0.0, 1.5, float("nan"))),
        *(("top_k", value) for value in (-1, 2**31, 2**70)),
    ],
)
def test_sampling_that_cannot_be_is_the_fault_of_its_request_alone(make: Make, name: str, value: float) -> None:
    engine, sound, wrong = make(), request(3, seeds=(5,)), request(3, seeds=(5,), **{name: value})

    async def together() -> list[object]:
        return await asyncio.gather(collect(engine, sound), collect(engine, wrong), return_exceptions=True)

    answer, error = run(together())
    assert isinstance(error, UserError) and f"{name} {value}" in str(error)
    assert tokens(answer) == tokens(ask(engine, sound)[0])  # type: ignore[arg-type]


def test_stop_strings_need_a_tokenizer() -> None:
    engine = NativeEngine(model(), max_running=2)
    engine.load_weights(0, None)
    with pytest.raises(UserError, match="tokenizer"):
        ask(engine, request(1, stop_strings=("a",)))


def test_a_model_with_other_attention_is_refused() -> None:
    with pytest.raises(EngineError, match="attn_implementation='tandem'"):
        NativeEngine(model(attention="sdpa"), max_running=2)


def test_no_answer_without_weights() -> None:
    for engine in (NativeEngine(model(), max_running=2), FakeEngine([[0.0, 0.0], [0.0, 0.0]])):
        with pytest.raises(EngineError, match="load_weights"):
            ask(engine, request(1))
        with pytest.raises(EngineError, match="load_weights"):
            _ = engine.version


def test_the_fake_answers_as_its_chain_says() -> None:
    """0 is followed by 2; 2 by 1 (e / (1 + e)) or by itself; 1 by itself."""
    never = -float("inf")
    engine = FakeEngine([[never, never, 0.0], [never, 0.0, never], [never, 1.0, 0.0]])
    engine.load_weights(0, None)
    ((greedy,), sampled) = ask(
        engine, request(1, 0, temperature=0.0, max_tokens=4), request(0, seeds=range(50), stop_token_ids=(1,))
    )
    assert greedy.token_ids.tolist() == [2, 1, 1, 1]
    np.testing.assert_allclose(greedy.logprobs, [0, 1 - np.log(1 + np.e), 0, 0], atol=1e-6)
    for completion in sampled:
        *twos, one = completion.token_ids.tolist()
        assert set(twos) == {2} and one == 1 and completion.status is Status.COMPLETED
    assert len({len(completion.token_ids) for completion in sampled}) > 1


# The native engine against transformers.


def reference_logprobs(reference: PreTrainedModel, asked: Request, completion: Completion) -> np.ndarray[Any, Any]:
    """One row at a time through transformers' own attention, no cache."""
    row = torch.from_numpy(np.concatenate([asked.token_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = reference(row[None]).logits[0].float() / (asked.sampling.temperature or 1)
    logprobs = logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
    return logprobs[len(asked.token_ids) - 1 :].numpy()


def widths_of(engine: NativeEngine) -> list[int]:
    """How many tokens each pass of the model has from now on. The hook is on the whole model, as one on its body or in
    it would keep the body from being fused."""
    widths: list[int] = []
    engine._model.register_forward_pre_hook(lambda _module, inputs: widths.append(inputs[0].shape[1]))
    return widths


def is_fused(engine: NativeEngine) -> bool:
    """Of an engine that has generated."""
    return isinstance(getattr(engine._model.base_model, "fused", None), Fused)


@pytest.mark.parametrize("max_running", [1, 3, 64])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logprobs_are_those_of_a_plain_forward_pass(family: str, max_running: int) -> None:
    reference = model(family, attention="sdpa")
    asked = (*MIXED, request(*range(20), seeds=range(5), max_tokens=30), request(7, 7, 7, seeds=(1,)))
    engine = native(max_running, family)
    for one, completions in zip(asked, ask(engine, *asked), strict=True):
        for completion in completions:
            expected = reference_logprobs(reference, one, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)
    assert is_fused(engine) == (family != "mistral")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_that_say_the_same_are_computed_once_until_they_part(family: str) -> None:
    engine, reference = native(max_running=24, family=family), model(family, attention="sdpa")
    widths = widths_of(engine)
    asked = (
        request(1, 2, 3, seeds=range(12), max_tokens=24, temperature=0.15),
        request(5, 4, seeds=range(6), max_tokens=9, temperature=0.0),
        request(1, 2, 3, seeds=range(6), max_tokens=16, temperature=0.15),
    )
    answers = ask(engine, *asked)
    assert is_fused(engine) == (family != "mistral")
    decoding = widths[1:]
    assert min(decoding) <= 8 < max(decoding)
    assert len({tuple(row) for row in tokens(answers[0])}) > 1
    for one, completions in zip(asked, answers, strict=True):
        for completion in completions:
            expected = reference_logprobs(reference, one, completion)
            bound = 2e-5 / (one.sampling.temperature or 1)  # of the logits, which a low temperature makes larger
            np.testing.assert_allclose(completion.logprobs, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("family", WINDOWS)
def test_rows_that_say_the_same_see_their_windows_alone(family: str) -> None:
    """To the end, far beyond the window: greedy, and so a row of each prompt stands for four in every pass."""
    engine, reference = native(max_running=12, family=family), model(family, attention="sdpa")
    widths = widths_of(engine)
    asked = [
        request(*prompt, seeds=range(4), max_tokens=40, temperature=0.0) for prompt in ([1, 2, 3], range(4, 13), [5])
    ]
    answers = ask(engine, *asked)
    assert is_fused(engine) == (family != "mistral")
    assert widths == [13, *[3] * 39]
    for one, completions in zip(asked, answers, strict=True):
        for completion in completions:
            expected = reference_logprobs(reference, one, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_prompt_is_scored_as_a_plain_forward_pass_does_in_any_number_of_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, prompt = model(family, attention="sdpa"), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    with torch.no_grad():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    for most_logits in (10, 5 * VOCABULARY, 2**20):
        monkeypatch.setattr("tandem.generation.prompt_logprobs._MOST_LOGITS", most_logits)
        ((completion,),) = ask(native(family=family), replace(request(*prompt), prompt_logprobs=True, top_logprobs=3))
        assert completion.prompt is not None and completion.prompt.top is not None
        np.testing.assert_allclose(completion.prompt.logprobs, expected, atol=2e-5, rtol=0)
        np.testing.assert_allclose(completion.prompt.top.logprobs, logprobs[:-1].topk(3).values, atol=2e-5, rtol=0)


def test_requests_that_differ_in_their_seeds_alone_are_answered_as_one_and_compute_their_prompt_once() -> None:
    whole, parts = native(max_running=8), native(max_running=8)
    (expected,) = ask(whole, request(1, 2, 3, seeds=range(4)))
    found = [one for (one,) in ask(parts, *(request(1, 2, 3, seeds=(seed,)) for seed in range(4)))]
    assert whole.prefilled_tokens == parts.prefilled_tokens == 3
    assert tokens(found) == tokens(expected)
    for one, sibling in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.logprobs, sibling.logprobs)


@pytest.mark.parametrize(
    "other",
    [
        request(1, 2, 4),
        request(1, 2, 3, max_tokens=11),
        replace(request(1, 2, 3), keep=True),
        replace(request(1, 2, 3), made=1),
        replace(request(1, 2, 3), top_logprobs=2),
        replace(request(1, 2, 3), prompt_logprobs=True),
    ],
)
def test_requests_that_differ_otherwise_are_answered_each_as_it_asks(other: Request) -> None:
    engine, plain = native(max_running=8), request(1, 2, 3)
    (one,), (another,) = ask(engine, plain, other)
    assert engine.prefilled_tokens == 2 * 3
    for alone, completion in ((plain, one), (other, another)):
        ((expected,),) = ask(native(), alone)
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        assert (completion.top is None, completion.prompt is None) == (expected.top is None, expected.prompt is None)


def test_a_caller_that_leaves_takes_nothing_from_those_that_ask_the_same() -> None:
    """One of its samples runs, and one waits, before those of another caller and after those of a third."""
    engine = native(max_running=1)

    async def leave() -> list[Completion]:
        first, leaving, last = (
            asyncio.create_task(collect(engine, request(1, seeds=seeds))) for seeds in ((1,), (2, 3), (4, 5))
        )
        await first
        leaving.cancel()
        return await last

    assert tokens(run(leave())) == tokens(ask(native(), request(1, seeds=(4, 5)))[0])


def test_rows_that_enter_late_and_need_a_larger_cache_disturb_nobody() -> None:
    engine, reference = native(max_running=8, family="mistral"), model("mistral", attention="sdpa")
    early = request(1, 2, 3, seeds=range(3), max_tokens=30)
    late = request(*range(25), seeds=range(4), max_tokens=60)

    async def one_after_the_other() -> list[list[Completion]]:
        first = asyncio.create_task(collect(engine, early))
        for _ in range(6):
            await asyncio.sleep(0)
        second = asyncio.create_task(collect(engine, late))
        return [await first, await second]

    for asked, completions in zip((early, late), run(one_after_the_other()), strict=True):
        for completion in completions:
            expected = reference_logprobs(reference, asked, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)


def test_bfloat16_stays_near_its_own_forward_pass() -> None:
    reference = model("qwen3", attention="sdpa", dtype=torch.bfloat16)
    for one, completions in zip(MIXED, ask(native(family="qwen3", dtype=torch.bfloat16), *MIXED), strict=True):
        for completion in completions:
            expected = reference_logprobs(reference, one, completion)
            assert np.abs(completion.logprobs - expected).mean() < 0.05


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_is_that_of_generate(family: str) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    (completions,) = ask(native(family=family), request(*prompt, temperature=0.0, max_tokens=30))
    reference = model(family, attention="sdpa")
    expected = reference.generate(  # type: ignore[operator]
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=30
    )
    assert tokens(completions)[0] == expected[0, len(prompt) :].tolist()


def test_weights_changed_in_place_are_seen_and_given_ones_are_loaded() -> None:
    served, other = model(), model("qwen2")
    engine = NativeEngine(served, max_running=4)
    engine.load_weights(0, None)
    before = tokens(ask(engine, MIXED[0])[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        served.load_state_dict(other.state_dict())
    engine.load_weights(1, None)
    (in_place,) = ask(engine, MIXED[0])
    assert tokens(in_place) != before and (in_place[0].versions == 1).all()
    copied = native()
    copied.load_weights(1, other.named_parameters())
    assert tokens(ask(copied, MIXED[0])[0]) == tokens(in_place)
    with pytest.raises(AttributeError, match="nonsense"):
        copied.load_weights(2, [("nonsense", torch.zeros(1))])


def test_a_failure_reaches_every_caller_and_is_over_then() -> None:
    served = model()
    engine = NativeEngine(served, max_running=2)
    engine.load_weights(0, None)
    norm: torch.Tensor = served.get_parameter("model.norm.weight")
    with torch.no_grad():
        kept = norm.clone()
        norm.fill_(float("nan"))

    async def failing() -> list[object]:
        asked = (collect(engine, request(place, seeds=(1, 2))) for place in range(3))
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in run(failing()):
        assert isinstance(error, EngineError) and "not finite" in str(error)
    with torch.no_grad():
        norm.copy_(kept)
    assert tokens(ask(engine, MIXED[0])[0]) == tokens(ask(native(), MIXED[0])[0])


def test_a_caller_that_leaves_gives_its_rows_back_at_once() -> None:
    engine = native(max_running=3)

    async def leave() -> list[Completion]:
        leaving = asyncio.create_task(collect(engine, request(1, seeds=range(9), max_tokens=60)))
        await asyncio.sleep(0)
        staying = asyncio.create_task(collect(engine, MIXED[0]))
        for _ in range(5):
            await asyncio.sleep(0)
        leaving.cancel()
        answer = await staying
        engine.sleep()
        return answer

    assert tokens(run(leave())) == tokens(ask(native(), MIXED[0])[0])


def test_one_that_asks_again_and_again_does_not_hold_up_another() -> None:
    """Six clients repeat one question on two slots, and what is left of it when some have started is a queue's place:
    the seventh client's, asked once, comes after the six that were there."""
    engine = native(max_running=2)

    async def crowd() -> int:
        before, is_answered = 0, asyncio.Event()

        async def repeat(seed: int) -> None:
            nonlocal before
            for turn in range(20):
                if is_answered.is_set():
                    return
                await collect(engine, request(1, seeds=(100 * seed + turn,), max_tokens=4))
                before += not is_answered.is_set()

        async def once() -> None:
            await asyncio.sleep(0)
            await collect(engine, request(2, seeds=(1,), max_tokens=4))
            is_answered.set()

        await asyncio.gather(*(repeat(seed) for seed in range(6)), once())
        return before

    assert run(crowd()) <= 6 + 2


def test_lists_are_taken_where_tuples_are_meant() -> None:
    asked = request(1, seeds=(1,), max_tokens=5)
    listed: Any = replace(asked.sampling, stop_token_ids=[3], stop_strings=[])
    (of_list,) = ask(native(), replace(asked, sampling=listed))
    (of_tuple,) = ask(native(), replace(asked, sampling=replace(asked.sampling, stop_token_ids=(3,))))
    assert tokens(of_list) == tokens(of_tuple)


def test_a_caller_that_leaves_is_found_without_a_look_at_all_others_that_wait() -> None:
    class Unseen(list[NativeSample]):
        def __iter__(self) -> Any:
            raise AssertionError("it was looked at")

    engine, own, other = native(), asyncio.Queue[Any](), asyncio.Queue[Any]()
    first, second = (Asked.of(request(prompt), streamed=False) for prompt in (1, 2))
    engine._waiting[first] = Unseen([NativeSample(request(1), 0, False, other)])
    engine._waiting[second] = [NativeSample(request(2), 0, False, own)]
    engine._withdraw(own, second)
    assert list(engine._waiting) == [first]


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_an_iterator_closed_early_leaves_the_engine_idle(make: Make, streamed: bool) -> None:
    engine = make()
    stop = int(ask(engine, request(1))[0][0].token_ids[0])

    async def take_one() -> None:
        asked = request(1, seeds=range(9), stop_token_ids=(stop,), max_tokens=60)
        outputs: Any = engine.stream(asked) if streamed else engine.generate(asked)
        first = await anext(outputs)
        assert first.status is (None if streamed and first.token_ids[-1] != stop else Status.COMPLETED)
        await outputs.aclose()
        engine.sleep()

    run(take_one())


def test_a_streamed_token_costs_one_row_of_one_step() -> None:
    """Nothing is computed twice, however long the stream is."""
    engine = native(max_running=2)
    widths = widths_of(engine)
    deltas = run(collect_stream(engine, request(1, 2, 3, max_tokens=80)))[0]
    assert widths == [3, *[1] * 79]
    assert [len(delta.token_ids) for delta in deltas] == [1] * 80


def test_a_row_goes_on_in_a_cache_that_grew_for_one_that_ended_at_once() -> None:
    engine, slow = native(max_running=8), request(1, 2, max_tokens=12)

    async def both() -> list[Completion]:
        answering = asyncio.create_task(collect(engine, slow))
        for _ in range(5):
            await asyncio.sleep(0)
        await collect(engine, request(*[5] * 60, max_tokens=1))
        return await answering

    assert tokens(run(both())) == tokens(ask(native(), slow)[0])


def test_rows_that_say_the_same_read_the_keys_of_their_own_prompt() -> None:
    asked = [request(*prompt, seeds=(7,) * 4, max_tokens=20) for prompt in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    together = ask(native(max_running=12), *asked)
    for found, alone in zip(together, asked, strict=True):
        assert tokens(found) == 4 * tokens(ask(native(), replace(alone, seeds=(7,)))[0])


def test_a_stop_token_ends_a_row_that_waits_for_strings_too() -> None:
    plain = ask(native(), request(1, max_tokens=12))[0][0].token_ids
    stop = int(plain[4])
    (ended,) = ask(native(), request(1, max_tokens=12, stop_token_ids=(stop,), stop_strings=("no such text",)))[0]
    assert (
        ended.status is Status.COMPLETED
        and ended.token_ids.tolist() == plain[: plain.tolist().index(stop) + 1].tolist()
    )


def test_the_most_probable_tokens_are_those_of_the_row_that_wants_them_also_where_it_comes_later() -> None:
    engine, wanting = native(max_running=4), replace(request(4, 5, max_tokens=6), top_logprobs=3)

    async def both() -> list[Completion]:
        before = asyncio.create_task(collect(engine, request(1, 2, 3, max_tokens=30)))
        for _ in range(3):
            await asyncio.sleep(0)
        found = await collect(engine, wanting)
        assert (await before)[0].top is None
        return found

    (found,), (alone,) = run(both()), ask(native(), wanting)[0]
    assert found.top is not None and alone.top is not None
    assert found.top.token_ids.tolist() == alone.top.token_ids.tolist()


def test_a_failure_while_rows_start_reaches_their_caller_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native(max_running=8)

    async def both() -> list[Any]:
        first = asyncio.create_task(collect(engine, request(1, seeds=range(4), max_tokens=60)))
        for _ in range(20):
            await asyncio.sleep(0)
        monkeypatch.setattr("tandem.generation.native_rows.DecodeSlots._settled", failing)
        second = collect(engine, request(2, seeds=range(4), max_tokens=60))
        return await asyncio.gather(first, second, return_exceptions=True)

    def failing(*_: Any) -> Any:
        raise MemoryError("here")

    assert [str(error) for error in run(both())] == ["generation failed: here"] * 2


def test_what_was_asked_before_a_sleep_changes_nothing_after_it() -> None:
    """The memory that stays is not the room for prefixes, which follows the longest row."""

    async def conversations(engine: NativeEngine) -> list[Any]:
        async def one(number: int) -> list[int]:
            said = [number % VOCABULARY, 3]
            for turn in range(3):
                asked = replace(request(*said, seeds=(number * 10 + turn,), max_tokens=5), keep=True)
                said += [*(await collect(engine, asked))[0].token_ids.tolist(), turn]
            return said

        return list(await asyncio.gather(*map(one, range(12))))

    def after(earlier: list[Request]) -> tuple[list[Any], int]:
        engine = native(max_running=2)
        if earlier:
            ask(engine, *earlier)
        engine.sleep()
        engine.wake()
        engine.load_weights(1, None)
        before = engine.prefilled_tokens
        return run(conversations(engine)), engine.prefilled_tokens - before

    assert after([]) == after([request(1, max_tokens=POSITIONS - 2)])
