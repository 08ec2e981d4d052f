"""Functions and classes as tools: their schemas, what the policy is told, limits, state, rewards."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import ToolLimitsConfig, ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.files import load_named
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply, ToolCall
from tandem.rollout.make import make_environments
from tandem.rollout.tools.calls import Toolbox
from tandem.rollout.tools.function_tools import as_content, as_result
from tandem.types import Prompt

TOOLS = '''
import asyncio, time, threading
import numpy as np
from tandem import EnvironmentFailed

running = most = 0

def add(a: int, b: int = 1) -> int:
    """Add two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b

async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(seconds)
    finally:
        running -= 1
    return "waited"

barrier = threading.Barrier(8)

def meet() -> int:
    """Wait for seven others."""
    return barrier.wait(60) * 0

def stuck(seconds: float) -> str:
    """Block a thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return threading.current_thread().name

def raising(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    kinds = {"value": ValueError, "world": EnvironmentFailed, "exit": SystemExit, "interrupt": KeyboardInterrupt}
    raise kinds[kind](f"no {kind}")

async def leaving(status: int) -> str:
    """End the process.

    Args:
        status: With this.
    """
    raise SystemExit(status)

class Slow:
    log = []

    def reset(self, **row):
        time.sleep(row["answer"])

    def wait(self) -> str:
        """Wait."""
        return "waited"

    def get_reward(self):
        raise ValueError("nothing to reward")

    def close(self):
        self.log.append("closed")

def long(letters: int) -> str:
    """Say much.

    Args:
        letters: How much.
    """
    return "x" * letters

def plot(function: str, self: str, name: str) -> str:
    """Have arguments of names that we use, too.

    Args:
        function: One.
        self: Another one.
        name: And another one.
    """
    return function + self + name

def scored(x: int) -> tuple:
    """Give a reward.

    Args:
        x: A number.
    """
    return {"x": x}, np.float32(0.5), {"bonus": 2}

class Counter:
    def __init__(self, step: int = 1):
        self.total, self.step, self.closed = 0, step, False

    def reset(self, prompt, answer=None, **columns):
        return f" Count to {answer}."

    def count(self, times: int) -> int:
        """Count on.

        Args:
            times: How often.
        """
        self.total += times * self.step
        return self.total

    async def get_reward(self) -> float:
        return float(self.total)

    def _hidden(self): ...

def undocumented(a: int): ...
class Empty: ...
from os import getcwd
'''
PROMPT = Prompt(
    0,
    np.zeros(1, np.int32),
    "Go.",
    "default",
    None,
    {"prompt": [{"role": "user", "content": "Go."}], "answer": 3, "name": "row", "function": "f", "arguments": "x"},
)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return path


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_{name}", name, arguments)


def step(
    path: Path, names: list[Any], *turns: tuple[ToolCall, ...], broken: tuple[str, ...] = (), **limits: Any
) -> Any:
    """(replies, what closing gave, counts) of one trajectory."""
    forms = [
        f"{path}:{name}" if isinstance(name, str) else {**name, "function": f"{path}:{name['function']}"}
        for name in names
    ]
    config = ToolsEnvironmentConfig.model_validate({"tools": forms, "limits": limits})

    async def run() -> Any:
        environments = make_environments(config)
        await environments.open()
        environment = environments.make(PROMPT)
        opening = await environment.start(PROMPT)
        replies = [await environment.step(Answer("", turn, broken=broken)) for turn in turns]
        closing = await environment.close()
        await environments.close()
        return opening, replies, closing, environment

    return asyncio.run(run())


def said(reply: Reply) -> list[str]:
    return [message["content"] for message in reply.messages]


def test_a_call_s_result_is_said_back_with_its_name_and_id(tools: Path) -> None:
    _, (reply,), closing, environment = step(tools, ["add"], (call("add", a=1, b=2), call("add", a=5)))
    assert said(reply) == ["3", "6"] and closing is None
    assert reply.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "call_add", "content": "3"}
    assert environment.tools[0]["function"]["parameters"]["required"] == ["a"]
    assert environment.numbers["calls"] == 2


def test_arguments_and_columns_may_have_any_name(tools: Path) -> None:
    _, (reply,), _, _ = step(tools, ["plot", "Counter"], (call("plot", function="x", self="y", name="z"),))
    assert said(reply) == ["xyz"]


def test_a_turn_without_calls_ends_the_conversation(tools: Path) -> None:
    assert step(tools, ["add"], ())[1] == [Reply()]


def test_what_the_policy_does_wrong_is_said_back(tools: Path) -> None:
    wrong = (call("sub", a=1), call("add", a="x"), call("add"), call("add", a=1, c=2), call("raising", kind="value"))
    _, (reply,), _, environment = step(tools, ["add", "raising"], wrong, broken=("not a tool call: {",))
    texts = said(reply)
    assert texts[0] == "error: there is no tool 'sub', only add, raising"
    assert texts[1].startswith("error: add: a: input should be a valid integer")
    assert "a: missing" in texts[2] and "c: unexpected" in texts[3]
    assert texts[4] == "error: ValueError: no value" and texts[5] == "error: not a tool call: {"
    assert (
        environment.numbers | {"calls": 5, "unknown_tools": 1, "failed_calls": 4, "broken_calls": 1}
        == environment.numbers
    )


@pytest.mark.parametrize("reference", ["tools.py", "tools.py:", ":add"])
def test_a_reference_names_a_file_and_what_is_in_it(reference: str) -> None:
    with pytest.raises(UserError, match=r"write path/to/file.py:name or package.module:name"):
        load_named(reference, "tools:")


def test_what_ends_a_program_ends_no_run(tools: Path) -> None:
    calls = (call("raising", kind="exit"), call("raising", kind="interrupt"), call("leaving", status=0))
    _, (reply,), _, environment = step(tools, ["raising", "leaving"], calls)
    kinds = ("SystemExit('no exit')", "KeyboardInterrupt('no interrupt')", "SystemExit(0)")
    assert said(reply) == [f"error: RuntimeError: it raised {kind}" for kind in kinds]
    assert environment.numbers["failed_calls"] == 3


def test_an_instance_is_closed_whatever_its_other_methods_raise(tools: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="get_reward: ValueError: nothing to reward"):
        step(tools, ["Slow"], timeout_s=60)
    assert load_named(f"{tools}:Slow", "test").log == ["closed"]


def test_what_a_trajectory_begins_with_has_a_limit_too(tools: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"reset: TimeoutError: no end within 0.05 s"):
        step(tools, ["Slow"], timeout_s=0.05)


def test_threads_that_hang_are_not_left_behind_without_number(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.rollout.threads._left_behind", set())  # without those of other tests
    monkeypatch.setattr("tandem.rollout.threads._MOST_LEFT_BEHIND", 3)
    hanging = tuple(call("stuck", seconds=30.0) for _ in range(3))
    with pytest.raises(EnvironmentFailed, match=r"calls of functions hang in threads, .* stuck"):
        step(tools, ["stuck"], hanging, hanging, timeout_s=0.05)


def test_a_world_that_fails_is_no_message(tools: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="no world"):
        step(tools, ["raising"], (call("raising", kind="world"),))


def test_a_call_that_takes_too_long_is_told_and_a_thread_that_hangs_is_left_behind(tools: Path) -> None:
    calls = (call("slow", seconds=60.0), call("stuck", seconds=60.0), call("add", a=1))
    _, (reply,), _, environment = step(tools, ["slow", "stuck", "add"], calls, timeout_s=0.2)
    assert said(reply) == ["error: no answer within 0.2 s"] * 2 + ["2"]
    assert environment.numbers["timeouts"] == 2
    assert any(thread.name == "environment" and thread.daemon for thread in threading.enumerate())


def test_a_call_that_waits_for_its_turn_is_not_slow(tools: Path) -> None:
    names = [{"function": "slow", "calls_at_once": 2}]
    _, (reply,), _, _ = step(tools, names, tuple(call("slow", seconds=0.3) for _ in range(14)), timeout_s=2.0)
    assert said(reply) == ["waited"] * 14
    assert load_named(f"{tools}:most", "test") == 2


def test_calls_of_one_turn_run_at_the_same_time_and_plain_functions_in_threads(tools: Path) -> None:
    _, (reply,), _, _ = step(tools, ["meet"], tuple(call("meet") for _ in range(8)))
    assert said(reply) == ["0"] * 8


def test_a_world_that_fails_ends_the_other_calls_of_the_turn(tools: Path) -> None:
    with pytest.raises(EnvironmentFailed):
        step(tools, ["raising", "slow"], (call("slow", seconds=60.0), call("raising", kind="world")))
    assert load_named(f"{tools}:running", "test") == 0


def test_where_one_set_of_tools_cannot_be_opened_none_stays_open() -> None:
    class Set:
        schemas = ()

        def __init__(self, fails: bool = False) -> None:
            self.fails, self.log = fails, []

        async def open(self) -> None:
            self.log.append("open")
            if self.fails:
                raise UserError("no server")

        async def close(self) -> None:
            self.log.append("close")

    sets = [Set(), Set(fails=True), Set()]
    with pytest.raises(UserError, match="no server"):
        asyncio.run(Toolbox(sets, ToolLimitsConfig()).open())
    assert [one.log for one in sets] == [["open", "close"], ["open"], []]


def test_long_results_are_cut_and_said_to_be(tools: Path) -> None:
    _, (reply,), _, _ = step(tools, ["long"], (call("long", letters=1000),), result_characters=10)
    assert said(reply) == ["xxxxxxxxxx… (990 more characters)"]


def test_more_calls_than_a_turn_may_have_do_not_run(tools: Path) -> None:
    _, (reply,), _, environment = step(tools, ["add"], tuple(call("add", a=n) for n in range(4)), calls_a_turn=3)
    assert said(reply) == ["1", "2", "3", "error: not run: only 3 calls a turn are allowed"]
    assert environment.numbers["calls"] == 3


def test_a_function_may_give_a_reward_and_numbers(tools: Path) -> None:
    _, (reply,), _, environment = step(tools, ["scored"], (call("scored", x=1), call("scored", x=2)))
    assert said(reply) == ['{"x": 1}', '{"x": 2}'] and reply.reward == 1.0
    assert environment.numbers["bonus"] == 4


def test_a_class_has_an_instance_a_trajectory_that_sees_the_row(tools: Path) -> None:
    names = [{"function": "Counter", "arguments": {"step": 10}}, "add"]
    for _ in range(2):
        opening, replies, closing, environment = step(
            tools, names, (call("count", times=2),), (call("count", times=1),)
        )
        assert opening == [{"role": "user", "content": "Go. Count to 3."}]
        assert [said(reply) for reply in replies] == [["20"], ["30"]] and closing == 30.0
        assert [tool["function"]["name"] for tool in environment.tools] == ["count", "add"]
    assert PROMPT.row["prompt"] == [{"role": "user", "content": "Go."}], "the row itself is not changed"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nothing"], "there is no such function or class"),
        (["undocumented"], "docstring"),
        (["Empty"], "no public methods"),
        (["getcwd"], "Input built-in function"),
        ([{"function": "add", "arguments": {"a": 1}}], "is a function, which takes no `arguments`"),
        (["add", "add"], "two tools are named 'add'"),
    ],
)
def test_tools_that_cannot_be_are_told_before_anything_starts(tools: Path, names: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        step(tools, names)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([{"type": "person", "name": "Ada"}], '[{"type": "person", "name": "Ada"}]'),
        ([{"type": "text", "value": 3}], '[{"type": "text", "value": 3}]'),
        ([{"type": "image", "label": "cat"}], '[{"type": "image", "label": "cat"}]'),
        ([{"type": "text", "text": "a"}, {"type": "audio", "data": "b"}], "a[audio: not shown]"),
    ],
)
def test_records_with_a_type_are_no_parts_of_a_message(result: Any, said: str) -> None:
    """All of them is said, whatever their type is called."""
    assert as_content(result) == said
    assert as_result((result, 1.0)).content == said
