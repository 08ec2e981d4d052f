"""Tools in verl's published shape: a YAML file, and classes with create, execute, calc_reward and release."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.environment import Answer, EnvironmentFailed, ToolCall
from tandem.rollout.make import make_environments
from tandem.types import Prompt

MODULE = '''
class Response:
    def __init__(self, text=None, image=None, video=None):
        self.text, self.image, self.video = text, image, video

class Guess:
    """Remembers guesses, and gives what the last one is worth."""
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        assert list(tool_schema.function.parameters.properties) == ["answer", "odd"]
        assert tool_schema.function.parameters.properties["odd"].item == {"type": "string"}
        self._state = {}
    def get_openai_tool_schema(self):
        return self.tool_schema
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self._state[instance_id] = {"truth": ground_truth, "guesses": []}
        return instance_id, Response()
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("answer") == "crash":
            raise ValueError("cannot guess that")
        self._state[instance_id]["guesses"].append(parameters["answer"])
        reward = -0.1 if len(self._state[instance_id]["guesses"]) > 1 else 0.0
        return Response(text=f"{kwargs.get('prefix', '')}noted {parameters['answer']}"), reward, {"guesses": 1}
    async def calc_reward(self, instance_id, **kwargs):
        state = self._state[instance_id]
        return float(state["guesses"][-1] == state["truth"]) if state["guesses"] else 0.0
    async def release(self, instance_id, **kwargs):
        del self._state[instance_id]

class Old:
    """The shape of earlier versions: create returns the id, and texts are strings; nothing is async."""
    def __init__(self, config, tool_schema): ...
    def create(self, instance_id=None, **kwargs):
        return instance_id
    def execute(self, instance_id, parameters, **kwargs):
        return "old", 0.0, {}
    def calc_reward(self, instance_id, **kwargs):
        return 0.0
    def release(self, instance_id, **kwargs): ...
'''
FILE = """
tools:
  - class_name: published_tools.Guess
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: guess
        description: Note a guess.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The guess.}
            odd: {type: array, item: {type: string}}
          required: [answer]
  - class_name: published_tools.Old
    config: {}
    tool_schema: {type: function, function: {name: old, description: Old., parameters: {type: object, properties: {}}}}
"""
KWARGS = {"guess": {"create_kwargs": {"ground_truth": "7"}, "execute_kwargs": {"prefix": "> "}}}
ROW = {"prompt": "Guess.", "extra_info": {"need_tools_kwargs": True, "tools_kwargs": KWARGS}}
PROMPT = Prompt(0, np.zeros(1, np.int32), "Guess.", "default", None, ROW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("verl")
    (folder / "published_tools.py").write_text(MODULE)
    (folder / "tools.yaml").write_text(FILE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def hold(path: Path, *turns: list[tuple[str, dict[str, Any]]]) -> Any:
    config = ToolsEnvironmentConfig.model_validate({"tools": [{"type": "verl", "path": path}]})

    async def run() -> Any:
        environments = make_environments(config)
        await environments.open()
        environment = environments.make(PROMPT)
        await environment.start(PROMPT)
        replies = [
            await environment.step(Answer("", tuple(ToolCall("x", name, given) for name, given in turn)))
            for turn in turns
        ]
        return replies, await environment.close(), environment

    return asyncio.run(run())


def test_their_tools_run_as_they_are(folder: Path) -> None:
    replies, closing, environment = hold(
        folder / "tools.yaml", [("guess", {"answer": "6"})], [("guess", {"answer": "7"})]
    )
    assert [reply.messages[0]["content"] for reply in replies] == ["> noted 6", "> noted 7"]
    assert [reply.reward for reply in replies] == [0.0, -0.1] and closing == 1.0
    assert environment.numbers["guesses"] == 2
    assert environment.tools[0]["function"]["parameters"]["properties"]["odd"] == {
        "type": "array", "item": {"type": "string"}
    }, "schemas go to the template as they are, mistakes included"  # fmt: skip


def test_a_shape_of_earlier_versions_runs_too(folder: Path) -> None:
    (reply,), closing, _ = hold(folder / "tools.yaml", [("old", {})])
    assert reply.messages[0]["content"] == "old" and closing == 0.0


def test_what_a_tool_raises_is_said_back_and_an_instance_is_released(folder: Path) -> None:
    (reply, _), closing, _ = hold(folder / "tools.yaml", [("guess", {"answer": "crash"})], [("guess", {"answer": "7"})])
    assert reply.messages[0]["content"] == "error: ValueError: cannot guess that" and closing == 1.0


def test_the_first_calls_of_a_turn_share_an_instance(folder: Path) -> None:
    counted = "        Guess.made += 1; await asyncio.sleep(0.01)\n        self._state[instance_id] = {"
    slow = MODULE.replace("        self._state[instance_id] = {", counted).replace(
        "class Guess:", "class Guess:\n    made = 0"
    )
    (folder / "slow_tools.py").write_text(f"import asyncio\n{slow}")
    (folder / "slow.yaml").write_text(FILE.replace("published_tools", "slow_tools"))
    _, closing, _ = hold(folder / "slow.yaml", [("guess", {"answer": "6"}), ("guess", {"answer": "7"})])
    assert closing == 1.0 and load_named("slow_tools:Guess", "test").made == 1


def test_one_that_fails_in_the_end_keeps_no_other_from_being_released(folder: Path) -> None:
    failing = MODULE.replace("        return 0.0\n    def release", "        raise OSError('no')\n    def release")
    (folder / "failing_tools.py").write_text(
        f"log = []\n{failing}".replace("        del self._state", "        log.append(1); del self._state")
    )
    (folder / "failing.yaml").write_text(FILE.replace("published_tools", "failing_tools"))
    with pytest.raises(EnvironmentFailed, match="old: OSError: no"):
        hold(folder / "failing.yaml", [("old", {}), ("guess", {"answer": "7"})])
    assert load_named("failing_tools:log", "test") == [1]


def test_a_tool_that_cannot_be_created_is_a_failure_of_the_world(folder: Path) -> None:
    (folder / "broken_tools.py").write_text(
        MODULE.replace("self._state[instance_id] = {", 'raise OSError("no"); x = {')
    )
    (folder / "broken.yaml").write_text(FILE.replace("published_tools", "broken_tools"))
    with pytest.raises(EnvironmentFailed, match="guess: create: OSError: no"):
        hold(folder / "broken.yaml", [("guess", {"answer": "6"})])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "has no list `tools`"),
        ("tools: [{class_name: published_tools.Guess}]", "has no `tool_schema`"),
        (FILE.replace("published_tools.Guess", "published_tools.Gone"), "there is no class 'published_tools.Gone'"),
        (FILE.replace("published_tools.Guess", "no_such_package.Guess"), "importing no_such_package failed"),
        (FILE.replace("{type: native}", "[1]"), r"Guess: config: \[1\] is no section"),
        (FILE.replace("name: guess", "title: guess"), "has no `tool_schema`"),
        ("tools: [", "while parsing"),
    ],
)
def test_files_that_cannot_be_used_are_told(folder: Path, text: str, message: str) -> None:
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        hold(folder / "bad.yaml")
