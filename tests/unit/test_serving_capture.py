"""The endpoint that records, under the real `openai` client and agents that know nothing but its base URL."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tandem.rollout.session import Session
from tandem.serving.sessions import Sessions
from tests.agents import ADD, ANSWER, CALL, ScriptedEngine, a_session, check_record, tokenizer
from tests.endpoint import TOKEN, captured, wait_until

ASKED: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]


def calculating(prompt: str) -> str:
    """A policy that calls `add` once, and then says what it was told."""
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if "<tool_response>" in last:
        said = last.partition("<tool_response>")[2].partition("</tool_response>")[0]
        return f"<think>\nThe tool says {said}.\n</think>\n\nIt is {said}."
    return CALL if "What is" in last else ANSWER


class Served:
    """An endpoint in another thread, with an engine that says what a script says."""

    def __init__(self, url: str, sessions: Sessions, loop: asyncio.AbstractEventLoop, engine: ScriptedEngine) -> None:
        self.url, self.sessions, self.engine, self._loop = url, sessions, engine, loop
        self.http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"})

    def begin(self) -> str:
        return self.http.post("/sessions").json()["key"]

    def client(self, key: str, **how: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, **how})

    def told(self, key: str) -> dict[str, Any]:
        return self.http.get(f"/sessions/{key}/samples").json()

    def check(self, key: str, branches: int) -> dict[str, Any]:
        """What is recorded is what the engine made, and what the trainer is told."""
        session = self.sessions.find(key)
        assert session is not None
        found, told = check_record(session, self.engine, branches), self.told(key)
        for branch, sample in zip(found, told["samples"], strict=True):
            assert sample["prompt_ids"] == branch.prompt_ids.tolist()
            assert sample["response_ids"] == branch.response_ids.tolist()
            assert sample["loss_mask"] == branch.loss_mask.tolist()
            assert np.array(sample["logprobs"], np.float32).tolist() == branch.rollout_logprobs.tolist()
            assert sample["versions"] == branch.versions.tolist()
        return told


@contextmanager
def serving(script: Any = calculating, limit_s: float = 600, most: int = 1000, **session: Any) -> Iterator[Served]:
    engine = ScriptedEngine(script)

    def make() -> Session:
        return a_session(engine, **session)

    with captured(make, limit_s, most) as (url, sessions, loop):
        served = Served(url, sessions, loop, engine)
        with served.http:
            yield served


def solve(client: OpenAI, stream: bool) -> list[Any]:
    """The messages of an agent that runs the calls, and is thanked for by a user; then it sums up what was said."""
    messages = list(ASKED)
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(model="gpt-4o", messages=messages, tools=[ADD]) as events:  # type: ignore[list-item]
                for _event in events:
                    pass
                answer = events.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[ADD]).choices[0].message  # type: ignore[list-item]
        messages.append(answer.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in answer.tool_calls or []:
            numbers = json.loads(call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
    messages.append({"role": "user", "content": "Thanks! And now?"})
    client.chat.completions.create(model="gpt-4o", messages=messages, tools=[ADD])  # type: ignore[list-item]
    summary: Any = [{"role": "user", "content": "In summary: 1 + 2 is 3. Anything else?"}]
    client.chat.completions.create(model="gpt-4o", messages=summary, tools=[ADD])  # type: ignore[list-item]
    return messages


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool_is_recorded_and_a_summary_is_a_branch(stream: bool) -> None:
    with serving() as served:
        key = served.begin()
        with served.client(key) as client:
            messages = solve(client, stream)
        assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        assert messages[1]["reasoning_content"] == "hm" and not messages[1].get("content")
        assert messages[3]["content"] == "It is 3."
        told = served.check(key, branches=2)
        assert (told["status"], told["calls"], told["closed"], told["reward"]) == ("completed", 4, False, None)
        _, talk = told["samples"]
        assert [turn["author"] for turn in talk["turns"]] == ["policy", "tool", "policy", "user", "policy"]
        again = tokenizer().encode(tokenizer().decode(talk["prompt_ids"] + talk["response_ids"]))
        assert again != talk["prompt_ids"] + talk["response_ids"]


@pytest.mark.parametrize("given", [{}, {"tools": [ADD]}])
def test_a_policy_that_says_nothing_says_an_empty_text(given: dict[str, Any]) -> None:
    """Agents read `content` as a string wherever there are no calls."""
    with serving(lambda _: "") as served, served.client(served.begin()) as client:
        said = client.chat.completions.create(model="any", messages=ASKED, **given).choices[0].message
        assert said.content == "" and not said.tool_calls


def test_an_answer_has_what_the_published_interface_says() -> None:
    with serving() as served, served.client(served.begin()) as client:
        how: dict[str, Any] = {"model": "any", "messages": ASKED, "tools": [ADD]}
        answer = client.chat.completions.create(**how, n=2, logprobs=True, top_logprobs=0, stop=["never"])
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.model == "any"
        assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
        made_so = [(made, pytest.approx(logprobs, abs=1e-6)) for _, made, logprobs in served.engine.seen]
        for choice in answer.choices:
            assert choice.logprobs and choice.logprobs.content
            logprobs = [token.logprob for token in choice.logprobs.content]
            assert (choice.model_extra["token_ids"], logprobs) in made_so  # type: ignore[index]
        assert answer.usage and answer.usage.prompt_tokens == len(served.engine.seen[0][0])
        assert answer.usage.completion_tokens == sum(len(made) for _, made, _ in served.engine.seen)
        short = client.chat.completions.create(**how, max_tokens=2)
        assert short.choices[0].finish_reason == "length" and short.choices[0].message.tool_calls is None
        text = client.chat.completions.create(**how, tool_choice="none").choices[0]
        assert text.finish_reason == "stop" and text.message.content == CALL
        cut = client.chat.completions.create(model="any", messages=ASKED, stop=['"add'])
        assert cut.choices[0].message.content == CALL.partition('"add')[0]
        assert [model.id for model in client.models.list()] == ["policy"]
        options: Any = {"include_usage": True}
        *chunks, last = client.chat.completions.create(**how, n=2, stream=True, stream_options=options)
        assert last.choices == [] and last.usage and last.usage.completion_tokens > 0
        ended = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert ended == ["tool_calls"] * 2
        for forced in ("required", {"type": "function", "function": {"name": "add"}}):
            with pytest.raises(openai.BadRequestError, match="calls cannot be forced"):
                client.chat.completions.create(**how, tool_choice=forced)


def test_64_agents_at_once_are_recorded_each_by_itself() -> None:
    draw = random.Random(3)
    with serving(lambda prompt: CALL if draw.random() < 0.6 else ANSWER) as served:

        async def talk(number: int, key: str) -> int:
            by_path = number % 3 == 0
            base = f"{served.url}/s/{key}/v1" if by_path else f"{served.url}/v1"
            async with AsyncOpenAI(base_url=base, api_key="unused" if by_path else key, timeout=300) as client:
                messages: list[Any] = [{"role": "user", "content": f"agent {number}: 1 + 2?"}]
                for turn in range(4):
                    answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
                    said = answer.choices[0].message
                    messages.append(said.model_dump(exclude={"reasoning_content"} if number % 2 else set()))
                    calls = said.tool_calls or []
                    messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{turn}"} for call in calls]
                    messages += [] if calls else [{"role": "user", "content": f"And {turn}?"}]
                if number % 4 == 0:
                    summary: Any = [{"role": "user", "content": f"summary of {number}"}]
                    await client.chat.completions.create(model="m", messages=summary)
            return 2 if number % 4 == 0 else 1

        async def all_of_them(keys: list[str]) -> list[int]:
            return await asyncio.gather(*(talk(number, key) for number, key in enumerate(keys)))

        keys = [served.begin() for _ in range(64)]
        branches = asyncio.run(all_of_them(keys))
        for key, count in zip(keys, branches, strict=True):
            served.check(key, count)
        sessions = [served.sessions.find(key) for key in keys]
        nodes = [said.node for session in sessions if session is not None for said in session.answers]
        recorded = [(node.prompt_ids.tolist(), node.completion.token_ids.tolist()) for node in nodes]
        assert sorted(recorded) == sorted((prompt, made) for prompt, made, _ in served.engine.seen)


def test_the_agents_sdk_is_recorded() -> None:
    agents = pytest.importorskip("agents")

    async def run(base_url: str, key: str) -> str:
        @agents.function_tool
        def add(a: int, b: int) -> str:
            """Add two integers."""
            return str(a + b)

        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
            model = agents.OpenAIChatCompletionsModel("policy", client)
            agent = agents.Agent(name="a", instructions="Use the tool.", tools=[add], model=model)
            result = await agents.Runner.run(agent, "What is 1 + 2?")
            again = [*result.to_input_list(), {"role": "user", "content": "Once more?"}]
            await agents.Runner.run(agent, again)
            return result.final_output

    with serving() as served:
        key = served.begin()
        assert asyncio.run(run(f"{served.url}/v1", key)) == "It is 3."
        told = served.check(key, branches=1)
        assert [turn["author"] for turn in told["samples"][0]["turns"]] == [
            "policy",
            "tool",
            "policy",
            "user",
            "policy",
        ]


def test_smolagents_is_recorded_though_it_rewrites_its_history() -> None:
    smolagents = pytest.importorskip("smolagents")

    def script(prompt: str) -> str:
        if "Observation" in prompt.rpartition("<|im_start|>assistant")[0].rpartition("New task")[2]:
            return '<tool_call>{"name": "final_answer", "arguments": {"answer": 3}}</tool_call>'
        return CALL

    from smolagents import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    with serving(script) as served:
        key = served.begin()
        model = smolagents.OpenAIServerModel("policy", api_base=f"{served.url}/v1", api_key=key, tool_choice="auto")
        agent = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
        assert agent.run("What is 1 + 2?") == 3
        served.check(key, branches=2)


def test_a_retry_of_the_client_gets_the_answer_that_it_has_lost() -> None:
    go = asyncio.Event()

    async def slowly() -> str:
        await go.wait()
        return CALL

    with serving(lambda prompt: slowly()) as served, ThreadPoolExecutor(1) as pool:
        key = served.begin()
        session = served.sessions.find(key)
        assert session is not None
        with served.client(key, max_retries=2, timeout=0.5) as client:
            asked = pool.submit(client.chat.completions.create, model="m", messages=ASKED)
            try:
                wait_until(lambda: session.retried == 1)
            finally:
                served._loop.call_soon_threadsafe(go.set)
            assert asked.result().choices[0].message.content == CALL
        assert len(served.engine.seen) == 1
        served.check(key, branches=1)


class LosesTheFirst(httpx2.HTTPTransport):
    """A connection that breaks when the whole answer is there, once."""

    lost = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if not self.lost:
            self.lost = True
            response.read()
            response.close()
            raise httpx2.ReadError("the connection broke", request=request)
        return response


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_broke_on_its_way_is_sent_again_and_not_made_again(stream: bool) -> None:
    with serving() as served:
        key = served.begin()
        with (
            httpx2.Client(transport=LosesTheFirst()) as losing,
            served.client(key, max_retries=1, http_client=losing) as client,
        ):
            solve(client, stream)
        session = served.sessions.find(key)
        assert session is not None and (session.retried, session.asked) == (1, 4)
        assert len(served.engine.seen) == 4
        served.check(key, branches=2)


def test_an_answer_that_was_not_delivered_is_not_trained_on() -> None:
    go = asyncio.Event()

    async def slowly() -> str:
        await go.wait()
        return ANSWER

    for stream in (False, True):
        with serving(lambda prompt: slowly()) as served:
            key = served.begin()
            with served.client(key, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
                list(client.chat.completions.create(model="m", messages=ASKED, stream=stream))  # type: ignore[call-overload]
            session = served.sessions.find(key)
            assert session is not None
            wait_until(lambda session=session: session._requests[0].waiting == 0)
            served._loop.call_soon_threadsafe(go.set)
            wait_until(lambda served=served: len(served.engine.seen) == 1)
            assert served.told(key)["samples"] == []
            with served.client(key) as client:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
            served.check(key, branches=1)
        go = asyncio.Event()


def test_wrong_keys_are_refused() -> None:
    with serving() as served:
        key = served.begin()
        for wrong in ("another", key[:-1], TOKEN):
            with served.client(wrong) as client, pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(model="m", messages=ASKED)
        by_path = OpenAI(base_url=f"{served.url}/s/{key}x/v1", api_key="any", max_retries=0)
        with by_path as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": ""}):
            asked = [
                served.http.post("/sessions", headers=headers),
                served.http.get(f"/sessions/{key}/samples", headers=headers),
                served.http.delete(f"/sessions/{key}", headers=headers),
            ]
            assert [answer.status_code for answer in asked] == [401] * 3
        other = {"Authorization": f"Bearer {served.begin()}"}
        assert served.http.post(f"/sessions/{key}/reward", json=1, headers=other).status_code == 401
        named = {"X-Session-ID": "mine", "Authorization": "Bearer another"}
        assert served.http.get("/v1/models", headers=named).status_code == 401
        assert served.http.get("/sessions/none/samples").status_code == 404
        assert served.engine.seen == []


def test_a_program_may_name_its_sessions_beside_the_admin_key() -> None:
    with serving() as served:
        for name in ("trace-1", "trace-2"):
            with served.client(TOKEN, default_headers={"X-Session-ID": name}) as client:
                solve(client, stream=False)
        for name in ("trace-1", "trace-2"):
            assert len(served.check(name, branches=2)["messages"]) == 1


def test_a_name_lets_nobody_in_who_has_guessed_it() -> None:
    with serving() as served:
        with served.client(TOKEN, default_headers={"X-Session-ID": "trace-1"}) as client:
            client.models.list()
        as_key = {"Authorization": "Bearer trace-1"}
        asked = [
            served.http.get("/v1/models", headers=as_key),
            served.http.get("/s/trace-1/v1/models", headers={"Authorization": ""}),
            served.http.post("/sessions/trace-1/reward", json=1, headers=as_key),
        ]
        assert [answer.status_code for answer in asked] == [401] * 3
        assert served.http.get("/s/trace-1/v1/models").status_code == 200
        assert served.http.post("/sessions/trace-1/reward", json=1).json() == {"reward": 1.0}


def test_the_reward_is_the_agents_own_word() -> None:
    with serving() as served:
        key = served.begin()
        own = {"Authorization": f"Bearer {key}"}
        assert served.http.post(f"/sessions/{key}/reward", json={"reward": 0.5}, headers=own).json() == {"reward": 0.5}
        assert served.told(key)["reward"] == 0.5
        assert served.http.post(f"/sessions/{key}/reward", json=2).json() == {"reward": 2.0}
        for wrong in ("x", True, {"reward": None}, {"value": 1}):
            assert served.http.post(f"/sessions/{key}/reward", json=wrong).status_code == 400
        for wrong in (b"1" * 400, b"-1" + b"0" * 400, b"1e999", b"NaN", b"[" * 100_000):
            assert served.http.post(f"/sessions/{key}/reward", content=wrong).status_code == 400
        assert served.told(key)["reward"] == 2


def test_a_session_that_never_ends_is_closed_and_one_that_ends_is_forgotten() -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    with serving(lambda prompt: never(), limit_s=1) as served:
        key = served.begin()
        with served.client(key) as client:
            for _ in range(2):
                with pytest.raises(openai.PermissionDeniedError, match="has ended") as error:
                    client.chat.completions.create(model="m", messages=ASKED)
                assert error.value.code == "session_closed"
        assert served.told(key)["closed"] and served.told(key)["samples"] == []
        assert served.http.delete(f"/sessions/{key}").json() == {"calls": 1}
        assert served.http.get(f"/sessions/{key}/samples").status_code == 404 and len(served.sessions) == 0


def test_there_are_only_so_many_sessions_and_closed_ones_make_room() -> None:
    with serving(most=2) as served:
        keys = [served.begin() for _ in range(2)]
        assert served.http.post("/sessions").status_code == 429
        session = served.sessions.find(keys[0])
        assert session is not None
        session.close()
        served.begin()
        assert served.sessions.find(keys[0]) is None and len(served.sessions) == 2


def test_what_does_not_fit_is_refused_as_agents_understand_it_and_bodies_are_bounded() -> None:
    with serving(positions=600) as served:
        key = served.begin()
        with served.client(key) as client:
            client.chat.completions.create(model="m", messages=ASKED, max_tokens=50_000)
            assert served.told(key)["status"] == "completed"
            with pytest.raises(openai.BadRequestError) as error:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1 " * 1000}])
            assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
            assert served.told(key)["status"] == "truncated"
            with pytest.raises(openai.APIStatusError, match="body is longer"):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1" * 2**24}])
        served.check(key, branches=1)


def test_training_gives_no_alternatives_to_tokens() -> None:
    with serving(agent_samples=False) as served, served.client(served.begin()) as client:
        with pytest.raises(openai.BadRequestError, match="not while the policy is trained"):
            client.chat.completions.create(model="m", messages=ASKED, logprobs=True, top_logprobs=2)
        client.chat.completions.create(model="m", messages=ASKED, logprobs=True, temperature=0)
