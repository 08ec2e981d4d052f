"""Environments of the user's own: what they return, raise and how long they take is told by name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import OwnEnvironmentConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply
from tandem.rollout.make import make_environments
from tandem.types import Prompt

PROMPT = Prompt(0, np.zeros(1, np.int32), "Go.", "default", None, {"prompt": [{"role": "user", "content": "Go."}]})
WORLD = """
import asyncio, sys
import tandem


class World:
    tools, numbers = (), {}

    def __init__(self, start="prompt.row['prompt']", step="tandem.Reply(reward=1.0)", tools=()):
        self._start, self._step, self.tools = start, step, tools

    async def start(self, prompt):
        return eval(self._start)

    async def step(self, answer):
        said = eval(self._step)
        return await said if asyncio.iscoroutine(said) else said

    async def close(self):
        return None


class Plain(World):
    def step(self, answer):
        return tandem.Reply()


class Empty:
    pass


def stop():
    raise asyncio.CancelledError
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "world.py"
    path.write_text(WORLD)
    return f"{path}:World"


def reply_of(world: str, **arguments: Any) -> Reply:
    config = OwnEnvironmentConfig.model_validate(
        {"type": "own", "environment": world, "arguments": arguments, "timeout_s": 0.05}
    )

    async def run() -> Reply:
        environment = make_environments(config).make(PROMPT)
        await environment.start(PROMPT)
        reply = await environment.step(Answer("hello"))
        await environment.close()
        return reply

    return asyncio.run(run())


@pytest.mark.parametrize(
    "environment, arguments, said",
    [
        ("World", {"stop": 1}, "it does not take conversation.environment.arguments: got an unexpected"),
        ("Plain", {}, "its `step` must be a method, and `async def`"),
        ("Empty", {}, "its `start` must be a method, and `async def`"),
    ],
)
def test_what_no_instance_is_needed_for_is_told_before(
    world: str, environment: str, arguments: dict[str, Any], said: str
) -> None:
    named = world.replace("World", environment)
    config = OwnEnvironmentConfig.model_validate({"type": "own", "environment": named, "arguments": arguments})
    with pytest.raises(UserError, match=f"^conversation.environment.environment: .*:{environment}: {said}"):
        make_environments(config)


def test_a_sound_one_is_taken_at_its_word(world: str) -> None:
    assert reply_of(world) == Reply([], 1.0)
    told = "tandem.Reply(({'role': 'user', 'content': answer.content},))"
    assert reply_of(world, step=told).messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({"start": "None"}, "World.start gave None, no list of messages"),
        ({"start": "'hello'"}, "World.start gave 'hello', no list of messages"),
        ({"start": "[{'content': 'x'}]"}, "without a role"),
        ({"tools": None}, "World.tools are None, no list of schemas"),
        ({"step": "None"}, "World.step returned None, no tandem.Reply"),
        ({"step": "[{'role': 'user', 'content': 'x'}], 1.0"}, "no tandem.Reply"),
        ({"step": "tandem.Reply('go on')"}, "World.step gave 'go on', no list of messages"),
        ({"step": "tandem.Reply([{'role': 'user', 'content': b'x'}])"}, "whose content is bytes, no text"),
        ({"step": "asyncio.sleep(60)"}, "World.step: no end within 0.05 s"),
    ],
)
def test_what_nobody_can_use_is_a_failure_that_says_where(world: str, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        reply_of(world, **arguments)
    assert why in str(failed.value)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
        ({"step": "sys.exit(0)"}, "SystemExit"),
        ({"start": "stop()"}, "CancelledError"),
    ],
)
def test_nothing_that_it_raises_ends_the_event_loop(world: str, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception) as failed:
        reply_of(world, **arguments)
    assert why in str(failed.value)
