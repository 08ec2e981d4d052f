"""What vLLM has to do besides the contract of engines: take weights, keep versions apart, agree with the trainer.

Every test gives the shared engine the weights that it found.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from letters import VOCABULARY, letters, served_model
from openai import BadRequestError, OpenAI
from short_runs import ShortRuns
from test_generation import MIXED, ask, collect, reference_logprobs, request
from transformers import PreTrainedModel

from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.resumable import ResumableGeneration
from tandem.jobs.serve import EngineAnswerer
from tandem.types import Completion, Request, SamplingParams, Status
from tests.endpoint import TOKEN, served, wait_until

BOUND = 2e-5


@pytest.fixture
def engine(vllm_engine: ReplicatedEngine) -> Iterator[ReplicatedEngine]:
    vllm_engine.wake()
    yield vllm_engine
    vllm_engine.load_weights(0, served_model().named_parameters())


def changed(version: int) -> PreTrainedModel:
    """The weights of a version: each a little different, all of them."""
    model = served_model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.02 * ((version + number) % 5 + 1))
    return model


def check_against(model: PreTrainedModel, engine: ReplicatedEngine) -> None:
    for asked, completions in zip(MIXED, ask(engine, *MIXED), strict=True):
        for completion in completions:
            expected = reference_logprobs(model, asked, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=BOUND, rtol=0)
            assert (completion.versions == engine.version).all()


def test_after_each_publish_logprobs_are_those_of_the_published_weights(engine: ReplicatedEngine) -> None:
    for version in (1, 2, 3):
        model = changed(version)
        engine.load_weights(version, model.named_parameters())
        check_against(model, engine)


def test_publishing_while_requests_run_leaves_no_version_wrong_and_no_request_behind(
    engine: ReplicatedEngine, short_runs: ShortRuns
) -> None:
    """Each token's log-prob is that of the version it claims, in a context that is all the tokens before it."""
    models = [changed(version) for version in range(6)]
    asked = [request(place, seeds=range(2), max_tokens=60) for place in range(12)]

    engine.load_weights(0, models[0].named_parameters())

    async def publish_under_load() -> list[list[Completion]]:
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        with short_runs:
            for version in range(1, 81):
                await collect(engine, request(0, max_tokens=1))  # the others make tokens meanwhile
                engine.load_weights(version, models[version % 6].named_parameters())
                if all(answer.done() for answer in answers):
                    answers += [asyncio.create_task(collect(engine, one)) for one in asked]
        return await asyncio.gather(*answers)

    completions = asyncio.run(publish_under_load())
    assert all(len(answer) == 2 for answer in completions)
    used: set[int] = set()
    for number, answer in enumerate(completions):
        for completion in answer:
            assert len(completion.token_ids) == 60
            expected = [reference_logprobs(model, asked[number % 12], completion) for model in models]
            own = np.array([expected[version % 6][place] for place, version in enumerate(completion.versions)])
            np.testing.assert_allclose(completion.logprobs, own, atol=1e-4, rtol=0)  # versions differ by far more
            used |= set(completion.versions.tolist())
    assert len(used) > 50


def test_publishes_and_sleeps_while_requests_run_keep_each_token_by_the_version_that_it_names(
    engine: ReplicatedEngine, short_runs: ShortRuns
) -> None:
    """Answers that are aborted, kept and continued, among others that a publish meets as they run."""
    models = [changed(version) for version in range(6)]
    asked = [request(place, seeds=range(2), max_tokens=80) for place in range(8)]
    engine.load_weights(0, models[0].named_parameters())
    generation = ResumableGeneration(engine, letters())

    async def publish_under_load() -> dict[asyncio.Task[list[Completion]], tuple[Request, int]]:
        answers: dict[asyncio.Task[list[Completion]], tuple[Request, int]] = {}
        with short_runs:
            for version in range(1, 41):
                if all(answer.done() for answer in answers):
                    answers |= {asyncio.create_task(collect(generation, one)): (one, version - 1) for one in asked}
                await collect(generation, request(0, max_tokens=1 + version % 7))  # the others make tokens meanwhile
                if version % 2:
                    generation.pause()
                engine.load_weights(version, models[version % 6].named_parameters())
                generation.resume()
        await asyncio.wait(answers)
        return answers

    most = 0
    for answer, (one, oldest) in asyncio.run(publish_under_load()).items():
        for completion in answer.result():
            versions = completion.versions
            assert len(completion.token_ids) == len(versions) == 80 and completion.status is Status.TRUNCATED
            assert (np.diff(versions) >= 0).all() and versions[0] >= oldest
            expected = [reference_logprobs(model, one, completion) for model in models]
            own = np.array([expected[version % 6][place] for place, version in enumerate(versions)])
            np.testing.assert_allclose(completion.logprobs, own, atol=2 * BOUND, rtol=0)  # batches of any size
            most = max(most, len({*versions.tolist()}))
    assert most > 4, "several publishes met the same answer"


def test_a_conversation_goes_on_from_vllms_cache_until_other_weights_are_published(
    engine: ReplicatedEngine, vllm_counts: Path
) -> None:
    vllm_counts.unlink(missing_ok=True)
    row = [place % VOCABULARY for place in range(33)]
    for version in range(2):
        model = changed(version)
        engine.load_weights(version, model.named_parameters())
        for turn in range(3):
            asked = request(*row, seeds=(turn,), max_tokens=8)
            (completion,) = ask(engine, asked)[0]
            np.testing.assert_allclose(
                completion.logprobs, reference_logprobs(model, asked, completion), atol=BOUND, rtol=0
            )
            row += [*completion.token_ids.tolist(), turn, turn]
    ask(engine, replace(request(*row, max_tokens=2), prompt_logprobs=True))
    found = [int(line) for line in vllm_counts.read_text().split()]
    assert found == [0, 32, 32, 0, 64, 64, 0], "whole blocks of the turn before, none of other weights"


def test_vllm_says_how_many_samples_it_runs_at_once(engine: ReplicatedEngine) -> None:
    assert engine.limits.max_running >= 16


def test_a_draw_from_a_part_of_the_vocabulary_keeps_the_logprob_of_the_whole(engine: ReplicatedEngine) -> None:
    asked = request(1, 2, seeds=range(20), top_k=2, temperature=1.5)
    engine.load_weights(1, served_model().named_parameters())
    for completion in ask(engine, asked)[0]:
        np.testing.assert_allclose(
            completion.logprobs, reference_logprobs(served_model(), asked, completion), atol=BOUND, rtol=0
        )


def test_tokens_beyond_the_vocabulary_are_never_drawn(engine: ReplicatedEngine) -> None:
    (completions,) = ask(engine, request(1, seeds=range(50), temperature=2.0))
    assert max(int(completion.token_ids.max()) for completion in completions) < VOCABULARY


def test_what_vllm_refuses_is_an_error_of_that_request_alone(engine: ReplicatedEngine) -> None:
    with pytest.raises(UserError, match=r"the engine refuses the request.*temperature must be in"):
        ask(engine, request(1, temperature=5.0))
    assert len(ask(engine, request(1))[0]) == 1


@pytest.mark.filterwarnings("ignore")  # what vLLM's import says
def test_tokens_that_vllm_names_no_version_for_get_none(vllm: None) -> None:
    """A replica's answer with version -1 is refused (test_replicas.py)."""
    from vllm.logprobs import FlatLogprobs

    from tandem.generation.vllm import VllmEngine

    logprobs = FlatLogprobs([0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [-1.0] * 4, [1] * 4, [None] * 4)
    engine: Any = VllmEngine.__new__(VllmEngine)
    for spans, versions in ((None, [-1] * 4), ([SimpleNamespace(version="3", start=1, end=3)], [-1, 3, 3, -1])):
        engine._internal, engine._streamed = {7: "its name"}, set()
        made = SimpleNamespace(token_ids=[1, 2, 3, 4], logprobs=logprobs, weight_versions=spans, finish_reason="length")
        stale = [np.full(4, 9, dtype=np.int32) for _ in range(100)]
        del stale  # memory that an unfilled array would show
        output = SimpleNamespace(request_id="7:0", outputs=[made], finished=True, prompt_logprobs=None)
        number, completion = engine._read(output)
        assert number == 7 and completion.versions.tolist() == versions


def test_behind_the_endpoint_a_seeded_stream_is_the_answer_and_a_wrong_id_nobody_elses_fault(
    engine: ReplicatedEngine,
) -> None:
    defaults = SamplingParams(max_tokens=30)
    how: dict[str, Any] = {"model": "letters", "n": 2, "seed": 3, "max_tokens": 40, "logprobs": 0}
    with (
        served(EngineAnswerer(engine, letters(), "letters", defaults)) as (url,),
        OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        free = client.completions.create(prompt="abc", **how)
        for stop in (None, free.choices[0].text[8:11]):
            sound = [pool.submit(client.completions.create, prompt=["abc", "abc"], stop=stop, **how) for _ in "ab"]
            with pytest.raises(BadRequestError, match="token id 26 at position 1"):
                client.completions.create(prompt=[0, VOCABULARY], **how)
            whole = sound[0].result()
            assert whole.choices == sound[1].result().choices
            parts: dict[int, list[Any]] = {choice.index: [] for choice in whole.choices}
            for chunk in client.completions.create(prompt=["abc", "abc"], stop=stop, stream=True, **how):
                parts[chunk.choices[0].index].append(chunk.choices[0])
            for choice in whole.choices:
                own = parts[choice.index]
                assert "".join(part.text for part in own) == choice.text and len(own) > len(choice.text) // 2
                assert own[-1].finish_reason == choice.finish_reason
        assert whole.choices[0].text == whole.choices[2].text == free.choices[0].text[:8]


def test_what_a_client_that_left_asked_of_vllm_is_dropped(engine: ReplicatedEngine) -> None:
    with (
        served(EngineAnswerer(engine, letters(), "letters", SamplingParams())) as (url,),
        OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client,
    ):
        stream = client.completions.create(model="letters", prompt="abc", n=8, max_tokens=90, stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: not engine._pending())
        rest = client.completions.create(model="letters", prompt="abc", max_tokens=4)
        assert rest.usage is not None and rest.usage.completion_tokens == 4
