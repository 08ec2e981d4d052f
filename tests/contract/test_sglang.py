"""SGLang behind the seam: its real scheduler, and on a CPU no kernels of its own (`sglang_stub`).

On a CPU SGLang draws without seeds, so the contract's tests of seeds are not run on it.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import test_generation as contract
import torch
from letters import served_model
from test_generation import MIXED, ask, collect, collect_stream, joined, reference_logprobs, request, run, tokens
from test_vllm import changed, check_against

from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine
from tandem.types import Completion, Delta, Status
from tandem.weights.disk import DiskSync


@pytest.fixture
def engine(sglang_engine: ReplicatedEngine) -> Iterator[ReplicatedEngine]:
    sglang_engine.wake()
    sglang_engine.load_weights(0, served_model().named_parameters())
    yield sglang_engine


@pytest.mark.parametrize(
    "promise",
    [
        contract.test_every_sample_comes_once_and_whole,
        partial(contract.test_an_iterator_closed_early_leaves_the_engine_idle, streamed=False),
        partial(contract.test_an_iterator_closed_early_leaves_the_engine_idle, streamed=True),
        contract.test_a_prompts_log_probs_are_those_that_it_would_have_as_an_answer,
        contract.test_a_token_id_outside_the_vocabulary_is_the_fault_of_its_request_alone,
    ],
    ids=["whole", "closed early", "stream closed early", "prompt scored", "ids"],
)
def test_promises_of_every_engine(promise, engine: ReplicatedEngine) -> None:  # type: ignore[no-untyped-def]
    promise(lambda: engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, where SGLang keeps seeds and sleeps")
@pytest.mark.parametrize(
    "promise",
    [
        contract.test_a_seed_gives_its_tokens_whatever_else_is_asked,
        contract.test_stop_tokens_end_a_sample_and_belong_to_it,
        contract.test_stop_strings_end_a_sample_at_the_token_that_completes_them,
        contract.test_sleep_waits_for_nobody_and_wake_undoes_it,
    ],
    ids=lambda promise: promise.__name__,
)
def test_promises_that_take_a_gpu(promise, engine: ReplicatedEngine) -> None:  # type: ignore[no-untyped-def]
    promise(lambda: engine)


def test_greedy_has_one_answer_and_the_logprob_of_temperature_one(engine: ReplicatedEngine) -> None:
    greedy, sampled = ask(engine, request(1, 2, seeds=(1, 2), temperature=0.0), request(1, 2, seeds=range(40)))
    assert tokens(greedy)[0] == tokens(greedy)[1]
    first = [c.logprobs[0] for c in sampled if c.token_ids[0] == greedy[0].token_ids[0]]
    np.testing.assert_allclose(first, greedy[0].logprobs[0], atol=1e-6)
    assert first and max(c.logprobs[0] for c in sampled) <= greedy[0].logprobs[0] + 1e-6


def test_stop_tokens_and_strings_end_a_greedy_sample_where_they_are_complete(engine: ReplicatedEngine) -> None:
    ((free,),) = ask(engine, request(1, 2, temperature=0.0, max_tokens=30))
    row = free.token_ids.tolist()
    text = "".join(chr(97 + token) for token in row)
    by_id, by_text = ask(
        engine,
        request(1, 2, temperature=0.0, max_tokens=30, stop_token_ids=(row[4],)),
        request(1, 2, temperature=0.0, max_tokens=30, stop_strings=(text[3:6],)),
    )
    assert tokens(by_id)[0] == row[: row.index(row[4]) + 1]
    assert tokens(by_text)[0] == row[: text.find(text[3:6]) + 3]
    assert by_id[0].status is by_text[0].status is Status.COMPLETED


def test_a_greedy_stream_is_the_completion_in_parts(engine: ReplicatedEngine) -> None:
    ((free,),) = ask(engine, request(1, 2, temperature=0.0, max_tokens=30))
    text = "".join(chr(97 + token) for token in free.token_ids)
    asked = [
        request(1, 2, seeds=(1, 2), temperature=0.0, max_tokens=30),
        request(1, 2, temperature=0.0, max_tokens=30, stop_strings=(text[3:6],)),
        request(4, temperature=0.0, max_tokens=1),
    ]

    async def streams() -> list[list[list[Delta]]]:
        return await asyncio.gather(*(collect_stream(engine, one) for one in asked))

    for whole, deltas in zip(ask(engine, *asked), run(streams()), strict=True):
        for completion, own in zip(whole, deltas, strict=True):
            parts = joined(own)
            assert parts.token_ids.tolist() == completion.token_ids.tolist() and parts.status == completion.status
            assert parts.versions.tolist() == completion.versions.tolist()
            np.testing.assert_allclose(parts.logprobs, completion.logprobs, atol=2e-5, rtol=0)
            # tokens whose text may be the beginning of a stop string are held back
            assert completion.status is Status.COMPLETED or len(own) > len(completion.token_ids) // 2


def test_abort_ends_streams(engine: ReplicatedEngine) -> None:
    async def abort_halfway() -> list[list[Delta]]:
        deltas: list[list[Delta]] = [[] for _ in range(6)]
        async for delta in engine.stream(request(1, 2, seeds=range(6), max_tokens=80)):
            deltas[delta.sample].append(delta)
            if sum(map(len, deltas)) == 20:
                engine.abort()
        return deltas

    completions = [joined(own) for own in run(abort_halfway())]
    assert {completion.status for completion in completions} == {Status.ABORTED}
    assert 0 < max(len(completion.token_ids) for completion in completions) < 80


def test_abort_ends_what_runs_and_what_waits(engine: ReplicatedEngine) -> None:
    async def abort_halfway() -> list[list[Completion]]:
        first = asyncio.create_task(collect(engine, request(5, max_tokens=4)))
        asked = [request(place, seeds=range(3), max_tokens=80) for place in range(12)]
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        await first
        engine.abort()
        return await asyncio.gather(*answers)

    completions = [completion for answer in run(abort_halfway()) for completion in answer]
    assert len(completions) == 36 and {completion.status for completion in completions} == {Status.ABORTED}
    assert 0 < max(len(completion.token_ids) for completion in completions) < 80
    assert tokens(ask(engine, MIXED[-1])[0])[0]


def test_after_each_publish_logprobs_are_those_of_the_published_weights(engine: ReplicatedEngine) -> None:
    for version in (1, 2, 3):
        model = changed(version)
        engine.load_weights(version, model.named_parameters())
        check_against(model, engine)


def test_a_directory_of_weights_is_loaded_as_well(engine: ReplicatedEngine) -> None:
    model, sync = changed(4), DiskSync(1 << 20)
    engine._publish(5, engine._replicas, lambda deliver: sync.publish(5, model.named_parameters(), deliver))
    engine._version = 5
    check_against(model, engine)
    sync.close()


def test_publishing_while_requests_run_leaves_no_version_wrong_and_no_request_behind(engine: ReplicatedEngine) -> None:
    models = [served_model(), *(changed(version) for version in range(1, 5))]
    asked = [request(place, seeds=range(2), max_tokens=80) for place in range(6)]

    async def publish_under_load() -> list[list[Completion]]:
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        for version in range(1, 21):
            await asyncio.sleep(0.02)
            engine.load_weights(version, models[version % 5].named_parameters())
            if all(answer.done() for answer in answers):
                answers += [asyncio.create_task(collect(engine, one)) for one in asked]
        return await asyncio.gather(*answers)

    used: set[int] = set()
    for number, answer in enumerate(asyncio.run(publish_under_load())):
        assert len(answer) == 2
        for completion in answer:
            expected = [reference_logprobs(model, asked[number % 6], completion) for model in models]
            own = np.array([expected[version % 5][place] for place, version in enumerate(completion.versions)])
            np.testing.assert_allclose(completion.logprobs, own, atol=1e-4, rtol=0)
            used |= set(completion.versions.tolist())
    assert len(used) > 5


def test_positions_that_sglang_keeps_for_itself_are_not_asked_for(engine: ReplicatedEngine) -> None:
    (completions,) = ask(engine, request(*[1] * 84, max_tokens=6))
    assert len(completions[0].token_ids) == 6
    with pytest.raises(UserError, match=r"84 prompt tokens and 7 new ones; .* has 90 positions"):
        ask(engine, request(*[1] * 84, max_tokens=7))


def test_what_sglang_refuses_is_an_error_of_that_request_alone(engine: ReplicatedEngine) -> None:
    with pytest.raises(UserError, match=r"the engine refuses the request.*top_p must be in"):
        ask(engine, request(1, top_p=1.5))
    assert len(ask(engine, request(1))[0]) == 1
