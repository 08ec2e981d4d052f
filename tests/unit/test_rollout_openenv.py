"""OpenEnv's protocol, against a server that answers as openenv-core does, or not at all.

tests/learning/test_environments.py trains on the real server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from tandem.config.conversation import ConversationConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply
from tandem.rollout.make import make_environments
from tandem.types import Prompt

SCHEMA = {
    "action": {"properties": {"metadata": {"type": "object"}, "text": {"type": "string"}}, "required": ["text"]},
    "observation": {"properties": {"done": {}, "reward": {}, "metadata": {}, "text": {"type": "string"}}},
}
ROOM = {
    "metadata": {"type": "object"},
    "text": {"type": "string"},
    "room": {"type": "string"},
    "n": {"type": "integer"},
}


class Server:
    """Notes messages, and answers each with what `script` says to it; None: nothing, an exception: the end."""

    def __init__(self, script: Callable[[dict[str, Any]], Any], schema: Any = SCHEMA) -> None:
        self._script = script
        self._schema = schema
        self.heard: list[dict[str, Any]] = []
        self.open = self.most = 0

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps(self._schema))
        return None

    async def hold(self, connection: ServerConnection) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            async for raw in connection:
                message = json.loads(raw)
                self.heard.append(message)
                said = self._script(message)
                if isinstance(said, Exception):
                    return
                if said is not None:
                    await connection.send(json.dumps(said))
        finally:
            self.open -= 1


def told(text: str, reward: float | None = None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, **more}, "reward": reward, "done": done}}


def prompt(**row: Any) -> Prompt:
    return Prompt(5, np.zeros(1, np.int32), "?", "default", None, {"prompt": "Play.\n", **row})


def with_server(server: Server, use: Callable[[Any], Awaitable[Any]], **config: Any) -> Any:
    async def run() -> Any:
        async with serve(server.hold, "127.0.0.1", 0, process_request=server.answer_http) as listening:
            port = next(iter(listening.sockets)).getsockname()[1]
            section = {"type": "openenv", "base_url": f"http://127.0.0.1:{port}/", "timeout_s": 20, **config}
            environments = make_environments(ConversationConfig.model_validate({"environment": section}).environment)
            await environments.open()
            result = await use(environments)
            await environments.close()
            return result

    return asyncio.run(run())


def play(server: Server, row: dict[str, Any], *answers: str, **config: Any) -> tuple[str, list[Reply], float | None]:
    async def use(environments: Any) -> tuple[str, list[Reply], float | None]:
        environment = environments.make(prompt(**row))
        try:
            (message,) = await environment.start(prompt(**row))
            replies = [await environment.step(Answer(text)) for text in answers]
        finally:
            closing = await environment.close()
        return message["content"], replies, closing

    return with_server(server, use, **config)


def echo(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        return told("Ready.")
    said = message["data"]["text"]
    return told(f"You said {said}.", 0.5, done=said == "end")


def test_a_session_is_reset_with_the_row_s_seed_and_options_and_stepped_with_the_policy_s_words() -> None:
    server = Server(echo)
    opening, replies, closing = play(server, {"seed": 7, "options": {"level": 2, "other": None}}, "hi", "end")
    assert opening == "Play.\nReady." and closing is None
    assert [(reply.messages, reply.reward) for reply in replies] == [
        ([{"role": "user", "content": "You said hi."}], 0.5),
        ((), 0.5),
    ]
    assert server.heard == [
        {"type": "reset", "data": {"level": 2, "seed": 7}},
        {"type": "step", "data": {"text": "hi"}},
        {"type": "step", "data": {"text": "end"}},
    ]


def test_fields_of_actions_and_observations_are_chosen() -> None:
    schema = {**SCHEMA, "action": {"properties": ROOM, "required": ["text", "room"]}}
    schema["observation"] = {"properties": {"text": {}, "score": {}}}
    server = Server(lambda message: told("Here.", score=3), schema)
    assert play(server, {}, "go", arguments={"room": "hall"})[0] == 'Play.\n{"text": "Here.", "score": 3}'
    assert server.heard[1]["data"] == {"room": "hall", "text": "go"}
    assert play(server, {}, arguments={"room": "hall"}, observation_field="score")[0] == "Play.\n3"


def test_what_is_cut_short_before_any_reward_has_earned_nothing() -> None:
    assert play(Server(lambda message: told("?")), {}, "a")[2] == 0.0
    assert play(Server(lambda message: told("?", done=message["type"] == "step")), {}, "a")[2] is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, "reset: the server said nothing for 3 s"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no such level"}}, "no such level"),
        ({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}, "CAPACITY_REACHED: full"),
        (OSError(), "reset: the connection ended"),
    ],
)
def test_a_server_that_errs_hangs_or_goes_is_a_failure_of_the_environment(said: Any, why: str) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        play(Server(lambda message: said), {}, timeout_s=3)


def test_sessions_beyond_the_limit_wait_also_when_some_fail() -> None:
    server = Server(lambda message: OSError() if message["data"].get("seed") == 0 else told("Ready."))

    async def use(environments: Any) -> None:
        async def one(seed: int) -> None:
            environment = environments.make(prompt(seed=seed))
            try:
                await environment.start(prompt(seed=seed))
                await asyncio.sleep(0.02)
            finally:
                await environment.close()

        results = await asyncio.gather(*(one(seed % 4) for seed in range(16)), return_exceptions=True)
        assert sum(isinstance(result, EnvironmentFailed) for result in results) == 4

    with_server(server, use, sessions_at_once=3)
    assert 2 <= server.most <= 3


@pytest.mark.parametrize(
    ("action", "config", "message"),
    [
        (SCHEMA["action"], {"action_field": "words"}, "action_field: name the field .* one of metadata, text"),
        ({"properties": ROOM, "required": ["text", "room"]}, {}, "action_field: name the field"),
        ({"properties": ROOM, "required": ["text", "room"]}, {"action_field": "text"}, "must be here: room"),
        (SCHEMA["action"], {"arguments": {"x": 1}}, "arguments: .* must be here: x"),
        ({"properties": ROOM, "required": ["n"]}, {}, "the field 'n' of the action takes integer, not text"),
        (SCHEMA["action"], {"observation_field": "reward"}, "observations have no field 'reward', only text"),
    ],
)
def test_a_configuration_that_does_not_fit_the_server_is_told(
    action: Any, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        play(Server(echo, {**SCHEMA, "action": action}), {}, **config)


@pytest.mark.parametrize(
    ("base_url", "message"),
    [("127.0.0.1:1", "begins with neither http"), ("http://127.0.0.1:1", "is an OpenEnv server running there")],
)
def test_a_server_that_is_not_there_is_told(base_url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        play(Server(echo), {}, base_url=base_url)


def test_a_server_of_another_kind_is_told() -> None:
    with pytest.raises(UserError, match="this is no OpenEnv server"):
        play(Server(echo, {"paths": {}}), {})
