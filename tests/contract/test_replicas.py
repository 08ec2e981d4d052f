"""Replicas as one engine: routing, and what becomes of requests when processes stop, die or talk nonsense."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stepped import MAX_RUNNING, expected_tokens
from test_generation import ask, collect, collect_stream, joined, request, run

from tandem.config.generation import VllmGenerationConfig
from tandem.errors import EngineError, UserError, WorkerLost
from tandem.generation.channel import ChannelClosed
from tandem.generation.replica import Replica, ReplicaSpec, ReplicaState
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.resumable import ResumableGeneration
from tandem.types import Completion, Delta, Request, Status
from tandem.weights.base import Weights
from tandem.weights.shared_memory import SharedMemorySync
from tests.endpoint import wait_until

Make = Callable[..., ReplicatedEngine]


def weights(version: int) -> Weights:
    return [("w", torch.tensor([1.0 + version]))]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ReplicatedEngine] = []

    def make_one(replicas: int = 2, recover: bool = True, **settings: Any) -> ReplicatedEngine:
        settings = {"health_timeout_s": 0.4, "max_restarts": 3, **settings}
        config = VllmGenerationConfig(type="vllm", replicas=replicas, **settings)
        here = {"PYTHONPATH": str(Path(__file__).parent)}
        spec = ReplicaSpec("stepped", "SteppedEngine", (tmp_path / "fault",), {}, here)
        sync = SharedMemorySync(1024, source=(lambda: weights(made[0].version)) if recover else None)
        made.append(ReplicatedEngine(spec, config, sync))
        made[0].load_weights(0, weights(0))
        return made[0]

    yield make_one
    for engine in made:
        engine.close()


def check(asked: Request, completions: list[Completion]) -> None:
    """Every sample came, whole, and each token by the weights that it claims."""
    assert [completion.sample for completion in completions] == list(range(len(asked.seeds)))
    for completion in completions:
        assert completion.token_ids.tolist() == expected_tokens(asked, completion.sample)
        np.testing.assert_array_equal(completion.logprobs, -1.0 - completion.versions)
        assert (np.diff(completion.versions) >= 0).all()


def test_requests_are_spread_and_siblings_stay_together(make: Make) -> None:
    engine = make(replicas=3)
    asked = [request(place, seeds=range(4), max_tokens=200) for place in range(6)]

    async def loads() -> list[list[int]]:
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        await asyncio.sleep(0.05)
        found = [sorted(id(sample.request) for sample in replica.samples.values()) for replica in engine._replicas]
        for one, answer in zip(asked, await asyncio.gather(*answers), strict=True):
            check(one, answer)
        return found

    found = run(loads())
    assert [len(requests) for requests in found] == [8, 8, 8]
    assert all(len(set(requests)) == 2 for requests in found)


def test_a_conversation_returns_to_the_replica_that_knows_it(make: Make) -> None:
    engine = make(replicas=3)
    first = request(*range(40), max_tokens=100)
    longer = request(*range(40), *expected_tokens(first, 0), max_tokens=100)

    async def places() -> list[int]:
        found = []
        for one in (first, longer, request(*range(1, 41), max_tokens=100)):
            others = [asyncio.create_task(collect(engine, request(place, max_tokens=30))) for place in (1, 2)]
            answer = asyncio.create_task(collect(engine, one))
            await asyncio.sleep(0.05)
            found += [
                place
                for place, replica in enumerate(engine._replicas)
                if any(sample.request is one for sample in replica.samples.values())
            ]
            await asyncio.gather(answer, *others)
        return found

    known, again, _ = run(places())
    assert known == again


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_conversations_that_begin_alike_return_each_to_its_own_replica(make: Make, streamed: bool) -> None:
    """They are told apart by what was said in them; the last turn is known by what was said in the one before it."""
    engine = make(replicas=3)
    rows = [list(range(40)) for _ in range(6)]

    async def turn(number: int, told: int) -> int:
        row = rows[number]
        asked = replace(request(*row, seeds=(number,), max_tokens=50), keep=True)
        answer = asyncio.create_task((collect_stream if streamed else collect)(engine, asked))
        await asyncio.sleep(0.02)
        (place,) = (
            place
            for place, replica in enumerate(engine._replicas)
            if any(sample.request is asked for sample in replica.samples.values())
        )
        await answer
        rows[number] = [*row, *expected_tokens(asked, 0), *[told] * 40]
        return place

    async def turns() -> list[list[int]]:
        first = await asyncio.gather(*(turn(number, 1) for number in range(6)))
        return [first, *[[await turn(number, told) for number in range(6)] for told in (2, 3)]]

    first, *later = run(turns())
    assert len(set(first)) == 3 and later == [first, first]


FAULTS = ("stop", "kill", "raise", "bytes", "token", "version", "length", "short", "older", "unversioned")


def strike(engine: ReplicatedEngine, fault: str, file: Path) -> None:
    victim = max(engine._replicas, key=lambda replica: len(replica.samples))
    if fault in ("stop", "kill"):
        os.kill(victim.process.pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    else:
        file.write_text(fault)


@pytest.mark.parametrize("replicas", [1, 3])
def test_whatever_happens_to_processes_each_sample_completes_by_the_weights_it_claims(
    make: Make, tmp_path: Path, replicas: int
) -> None:
    engine = make(replicas)

    async def suffer() -> None:
        for number, fault in enumerate(FAULTS):
            asked = [request(place, number, seeds=range(3), max_tokens=60) for place in range(4)]
            answers = [asyncio.create_task(collect(engine, one)) for one in asked]
            await asyncio.sleep(0.05)
            strike(engine, fault, tmp_path / "fault")
            if number % 2:
                engine.load_weights(number, weights(number))
            for one, answer in zip(asked, await asyncio.gather(*answers), strict=True):
                check(one, answer)

    before = [replica.process.pid for replica in engine._replicas]
    run(suffer())
    assert engine.version == 9
    assert before != [replica.process.pid for replica in engine._replicas]


@pytest.mark.parametrize("fault", ["kill", "raise", "token", "unversioned"])
def test_a_stream_whose_replica_is_lost_goes_on_without_a_gap_or_a_repetition(
    make: Make, tmp_path: Path, fault: str
) -> None:
    engine = make(replicas=2)
    asked = [request(place, seeds=range(3), max_tokens=80) for place in range(4)]

    async def suffer() -> list[list[list[Delta]]]:
        streams = [asyncio.create_task(collect_stream(engine, one)) for one in asked]
        await asyncio.sleep(0.08)
        strike(engine, fault, tmp_path / "fault")
        return await asyncio.gather(*streams)

    for one, deltas in zip(asked, run(suffer()), strict=True):
        check(one, [joined(own) for own in deltas])


def test_a_stream_that_another_replica_continues_differently_is_an_error(make: Make, tmp_path: Path) -> None:
    engine = make(replicas=1)

    async def suffer() -> None:
        stream = asyncio.create_task(collect_stream(engine, request(1, max_tokens=200)))
        await asyncio.sleep(0.08)
        (tmp_path / "salt").write_text("1")
        strike(engine, "kill", tmp_path / "fault")
        await stream

    with pytest.raises(EngineError, match="another one continues it differently"):
        run(suffer())
    engine.sleep()  # nothing is left of it


def test_what_the_engine_refuses_is_the_mistake_of_that_request_alone(make: Make) -> None:
    engine = make(replicas=1)
    with pytest.raises(UserError, match="the engine refuses the request: top_k 13 is bad luck"):
        ask(engine, request(1, top_k=13))
    check(request(1), ask(engine, request(1))[0])


@pytest.mark.parametrize("wanted", [{"top_logprobs": 2}, {"prompt_logprobs": True}], ids=str)
def test_an_answer_without_the_log_probs_that_are_wanted_is_no_sound_one(make: Make, wanted: dict[str, Any]) -> None:
    engine = make(replicas=1, max_restarts=0)  # its engines give none
    with pytest.raises(EngineError, match="no sound answer"):
        ask(engine, replace(request(1, 2), **wanted))


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_samples_that_nobody_waits_for_any_more_take_no_others_with_them(make: Make, streamed: bool) -> None:
    """What the engine gives of others while it ends them is theirs."""
    engine = make(replicas=1)
    asked = [request(place, seeds=range(2), max_tokens=place + 1) for place in range(40)]

    async def withdraw_often() -> list[list[Completion]]:
        follow = collect_stream if streamed else collect
        answers = [asyncio.create_task(follow(engine, one)) for one in asked]
        while not all(answer.done() for answer in answers):
            unwanted = asyncio.create_task(collect(engine, request(7, max_tokens=900)))
            await asyncio.sleep(0.002)
            unwanted.cancel()
        whole = await asyncio.gather(*answers)
        return [[joined(own) for own in answer] for answer in whole] if streamed else whole

    for one, completions in zip(asked, run(asyncio.wait_for(withdraw_often(), 60)), strict=True):
        check(one, completions)


def test_two_hundred_publishes_under_load_lose_no_request_and_mistake_no_version(make: Make) -> None:
    engine = make(replicas=2)
    asked = [request(place, seeds=range(3), max_tokens=40) for place in range(6)]

    async def publish_under_load() -> int:
        done = 0
        answers = {asyncio.create_task(collect(engine, one)): one for one in asked}
        oldest = dict.fromkeys(answers, 0)
        for version in range(1, 201):
            engine.load_weights(version, weights(version))
            await asyncio.sleep(0.005)
            for answer in [answer for answer in answers if answer.done()]:
                one = answers.pop(answer)
                check(one, answer.result())
                assert all(completion.versions[0] >= oldest[answer] for completion in answer.result())
                done += len({*np.concatenate([completion.versions for completion in answer.result()])}) > 1
                again = asyncio.create_task(collect(engine, one))
                answers[again], oldest[again] = one, version
        for answer, one in answers.items():
            check(one, await answer)
        return done

    assert run(publish_under_load()) > 10, "requests that publishes met on their way"
    assert engine.version == 200


@pytest.mark.parametrize("sleep", ["never", "cache", "weights"])
def test_what_runs_when_the_engine_sleeps_goes_on_by_the_weights_that_it_wakes_with(
    make: Make, tmp_path: Path, sleep: str
) -> None:
    """Also where requests come while it sleeps, and where a replica is lost with what it had under way."""
    engine = make(replicas=2, sleep=sleep)
    generation = ResumableGeneration(engine, None)

    async def suffer() -> None:
        answers: dict[asyncio.Task[list[Completion]], tuple[Request, int]] = {}
        for version in range(1, 25):
            for place in range(3):
                asked = request(place, version, seeds=range(3), max_tokens=60)
                answers[asyncio.create_task(collect(generation, asked))] = asked, engine.version
            await asyncio.sleep(0.03)
            if version % 6 == 0:
                strike(engine, "kill", tmp_path / "fault")
            generation.pause()
            generation.pause()
            asleep = request(9, version, max_tokens=5)
            answers[asyncio.create_task(collect(generation, asleep))] = asleep, version
            await asyncio.sleep(0)
            engine.load_weights(version, weights(version))
            generation.resume()
        continued = 0
        for answer, (asked, oldest) in answers.items():
            check(asked, await answer)
            assert all(completion.versions[0] >= oldest for completion in await answer)
            continued += any(len({*completion.versions}) > 1 for completion in await answer)
        assert continued > 20 and generation.unfinished == 0

    run(suffer())


def test_what_a_replica_cannot_begin_waits_for_whichever_is_free(make: Make) -> None:
    """One that stands still keeps what it has been given, which is hardly more than it runs."""
    engine = make(replicas=2, health_timeout_s=60.0)
    asked = [request(place, seeds=range(4), max_tokens=20) for place in range(15)]
    stopped = engine._replicas[0]

    async def hold_one_up() -> list[list[Completion]]:
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        await asyncio.sleep(0)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        while engine._waiting or engine._replicas[1].samples:
            assert len(stopped.samples) <= MAX_RUNNING + 1
            await asyncio.sleep(0.01)
        assert 0 < len(stopped.samples) <= MAX_RUNNING + 1, "the other one has made the rest"
        os.kill(stopped.process.pid, signal.SIGCONT)
        return await asyncio.gather(*answers)

    for one, completions in zip(asked, run(hold_one_up()), strict=True):
        check(one, completions)


def test_what_a_lost_replica_had_begun_goes_before_what_was_waiting(make: Make) -> None:
    engine = make(replicas=2)

    async def lose_one() -> list[int]:
        asked = [request(place, seeds=range(4), max_tokens=20) for place in range(15)]
        answers = [asyncio.create_task(collect(engine, one)) for one in asked]
        await asyncio.sleep(0)
        waited, lost = {*engine._waiting}, {*engine._replicas[0].samples}
        assert waited and min(lost) < min(waited)
        engine._replace(engine._replicas[0], ChannelClosed("lost"))
        waiting = [*engine._waiting]
        assert {*waiting} == waited | lost
        for one, answer in zip(asked, await asyncio.gather(*answers), strict=True):
            check(one, answer)
        return waiting

    waiting = run(lose_one())
    assert waiting == sorted(waiting)


def test_replicas_have_room_for_what_all_of_them_generate_at_once(make: Make) -> None:
    assert make(replicas=3).limits.max_running == 3 * MAX_RUNNING


def test_a_restarted_replica_serves_only_by_the_current_weights(make: Make) -> None:
    engine = make(replicas=1)
    engine.load_weights(4, weights(4))
    os.kill(engine._replicas[0].process.pid, signal.SIGKILL)
    (completions,) = ask(engine, request(1, seeds=(1, 2)))
    assert [set(completion.versions) for completion in completions] == [{4}, {4}]
    check(request(1, seeds=(1, 2)), completions)


def test_without_a_copy_of_the_weights_the_next_publish_brings_a_lost_replica_back(make: Make) -> None:
    engine = make(replicas=2, recover=False)
    os.kill(engine._replicas[0].process.pid, signal.SIGKILL)
    ask(engine, request(1))
    engine.load_weights(1, weights(1))
    asked = [request(place, seeds=(1, 2)) for place in range(4)]
    for one, completions in zip(asked, ask(engine, *asked), strict=True):
        check(one, completions)
    for replica in engine._replicas:
        os.kill(replica.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="with them the weights of version 1"):
        ask(engine, request(1))


def test_an_engine_that_only_fails_ends_the_run(make: Make, tmp_path: Path) -> None:
    engine = make(replicas=1, max_restarts=0)
    (tmp_path / "fault").write_text("raise")
    with pytest.raises(EngineError, match=r"lost 1 times in a row(.|\n)*RuntimeError: a fault"):
        ask(engine, request(1))


@pytest.mark.parametrize(
    ("fault", "told"),
    [("always raise", "RuntimeError: a fault of process"), ("always exit", "ended with exit status 3")],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_fails_as_before_is_not_started_a_third_time(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, told: str, replicas: int
) -> None:
    engine = make(replicas=replicas, max_restarts=100)
    (tmp_path / "fault").write_text(fault)
    with pytest.raises(EngineError, match=told) as raised:
        ask(engine, request(1))
    said = capfd.readouterr().err
    assert said.count("is started again") == replicas
    assert (said + str(raised.value)).count("Traceback") == (fault == "always raise")


def test_other_faults_and_kills_from_outside_are_not_the_same_fault(make: Make, tmp_path: Path) -> None:
    engine = make(replicas=1)
    asked = request(1, seeds=(1, 2), max_tokens=400)

    async def suffer() -> list[Completion]:
        answer = asyncio.create_task(collect(engine, asked))
        for fault in ("raise", "exit", "kill"):
            before = engine._replicas[0]
            while before.state is not ReplicaState.SERVING:
                await asyncio.sleep(0.01)
            if fault == "kill":
                os.kill(before.process.pid, signal.SIGKILL)
            else:
                (tmp_path / "fault").write_text(fault)
            while engine._replicas[0] is before:
                if answer.done():  # before the fault, which waits for a step
                    answer = asyncio.create_task(collect(engine, asked))
                await asyncio.sleep(0.01)
        return await answer

    check(asked, run(suffer()))
    assert engine._failures == 0


def test_a_call_reaches_a_replica_that_is_still_starting(make: Make) -> None:
    """As when one is lost before its engine is to sleep, or to wake, which waits for the answer."""
    engine = make(replicas=1)
    replica, messages, deadline = Replica.start(engine._spec), list[Any](), time.monotonic() + 60
    replica.send("call", 5, "wake")

    def is_answered() -> bool:
        messages.extend(replica.receive())
        return ("answer", 5) in messages or time.monotonic() > deadline

    wait_until(is_answered)
    replica.kill()
    assert [message[0] for message in messages] == ["ready", "answer"]


def test_an_engine_sleeps_and_wakes_with_a_replica_that_was_just_lost(make: Make) -> None:
    engine = make(replicas=1)
    engine._replicas[0].process.kill()
    wait_until(lambda: engine._pump(0.01) or engine._replicas[0].state is ReplicaState.STARTING)
    engine.sleep()
    engine.wake()
    check(request(1), ask(engine, request(1))[0])


def test_abort_reaches_samples_that_no_replica_has(make: Make) -> None:
    engine = make(replicas=1)

    async def kill_and_abort() -> list[Completion]:
        answer = asyncio.create_task(collect(engine, request(1, seeds=(1, 2), max_tokens=500)))
        await asyncio.sleep(0.05)
        os.kill(engine._replicas[0].process.pid, signal.SIGKILL)
        engine.abort()
        return await answer

    assert {completion.status for completion in run(kill_and_abort())} == {Status.ABORTED}


def test_the_processes_end_with_their_engine(make: Make) -> None:
    engine = make(replicas=2)
    processes = [replica.process for replica in engine._replicas]
    engine.close()
    assert all(process.returncode is not None for process in processes)
