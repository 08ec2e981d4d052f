"""Agents that know nothing but a base URL become trajectories: commands and functions, sound and failing ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import EngineError, UserError
from tandem.rollout.agents import Access, Agent, AgentsWord, CommandAgent, FunctionAgent, word_of
from tandem.rollout.environment import EnvironmentFailed
from tandem.serving.agent_training import AgentConversations, AgentLimits
from tandem.types import IntArray, Prompt, SamplingParams, Status, Trajectory
from tandem.workers.event_loop import PausingEventLoop
from tests.agents import ADD, ANSWER, CALL, ScriptedEngine, a_policy, stop_id, tokenizer

SAMPLING = SamplingParams(max_tokens=2000, stop_token_ids=(stop_id(),))
PROMPT = Prompt(0, np.array([1, 2], np.int32), "1 + 2?", "sums", "3", {"prompt": [{"role": "user"}], "a": 1, "b": 2})
COMMON = """
import json, os, sys
from openai import OpenAI

ADD = json.loads(THE_TOOL)


def solve(row, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        messages = [{"role": "user", "content": f"{row['a']} + {row['b']}?"}]
        for _ in range(2):
            said = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
            messages.append(said.model_dump())
            for call in said.tool_calls or []:
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        return messages[-1]["content"]
""".replace("THE_TOOL", repr(json.dumps(ADD)))


def calculating(prompt: str) -> str:
    return ANSWER if "<tool_response>" in prompt else CALL


def decode(rows: list[IntArray]) -> list[str]:
    return [str(tokenizer().decode(row.tolist(), skip_special_tokens=True)) for row in rows]


def limits(**other: Any) -> AgentLimits:
    return AgentLimits(**{"timeout_s": 60, "calls": 20, "at_once": 8, "retries": 1, **other})


async def _answers(agents: AgentConversations, seeds: list[int]) -> list[Trajectory]:
    await agents.open()
    try:
        return await agents.answer(PROMPT, seeds, SAMPLING)
    finally:
        await agents.close()


def trajectories(
    agent: Agent,
    engine: ScriptedEngine | None = None,
    seeds: tuple[int, ...] = (5,),
    positions: float = 100_000,
    **of_limits: Any,
) -> list[Trajectory]:
    policy = a_policy(engine or ScriptedEngine(calculating), positions=positions)
    return asyncio.run(_answers(AgentConversations(agent, limits(**of_limits), policy, decode), list(seeds)))


def written(folder: Path, text: str, name: str = "agent.py") -> Path:
    path = folder / name
    path.write_text(COMMON + text)
    return path


def command(path: Path) -> CommandAgent:
    return CommandAgent(f"{sys.executable} {path}")


MAIN = """
row = json.loads(sys.stdin.readline())
assert os.environ["TANDEM_PROMPT"] == "1 + 2?"
text = solve(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
print("a line of its own")
"""


@pytest.mark.parametrize(
    "last, reward, numbers",
    [
        ('print(json.dumps({"reward": float("Three" in text), "steps": 2}))', 1.0, {"steps": 2.0}),
        ("print(0.25)", 0.25, {}),
        ("", None, {}),
        ("print('done', 3)", None, {}),
    ],
)
def test_a_command_is_an_agent(tmp_path: Path, last: str, reward: float | None, numbers: dict[str, float]) -> None:
    engine = ScriptedEngine(calculating)
    (made,) = trajectories(command(written(tmp_path, MAIN + last)), engine)
    assert (made.status, made.reward, made.error) == (Status.COMPLETED, reward, None)
    none = dict.fromkeys(("out_of_turns", "without_room", "retried_calls", "environment_retries"), 0)
    counted = {"calls": 2, "branches": 1, **none}
    assert made.numbers == {**counted, **numbers}
    (first_prompt, first, _), (last_prompt, second, logprobs) = engine.seen
    assert made.prompt.token_ids.tolist() == first_prompt and made.prompt.ground_truth == "3"
    assert [*first_prompt, *made.response_ids] == [*last_prompt, *second]
    assert made.loss_mask.sum() == len(first) + len(second)
    assert made.rollout_logprobs[-len(second) :].tolist() == np.array(logprobs, np.float32).tolist()
    assert [message["role"] for message in made.messages] == ["assistant", "tool", "assistant"]
    assert made.text.endswith("Three, I think.") and [turn.author for turn in made.turns] == [
        "policy",
        "tool",
        "policy",
    ]


FUNCTIONS = """
import asyncio, urllib.request


def plain(row, base_url, api_key):
    return float("Three" in solve(row, base_url, api_key))


def endless(row, base_url, api_key):
    solve({**row, "a": "1 " * 5000}, base_url, api_key)


async def unblocked(row, base_url, api_key):
    return {"reward": await asyncio.to_thread(plain, row, base_url, api_key), "extra": 3}


def says_it_over_http(row, base_url, api_key):
    plain(row, base_url, api_key)
    url = base_url.removesuffix("/v1") + f"/sessions/{api_key}/reward"
    headers = {"Authorization": f"Bearer {api_key}"}
    urllib.request.urlopen(urllib.request.Request(url, b'{"reward": 0.5}', headers)).read()


def summing_up(row, base_url, api_key):
    plain(row, base_url, api_key)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        said = [{"role": "user", "content": "A summary."}]
        client.chat.completions.create(model="policy", messages=said)


def asking_for_ever(row, base_url, api_key):
    while True:
        plain(row, base_url, api_key)


def never_asking(row, base_url, api_key):
    return 1.0


def crashing(row, base_url, api_key):
    plain(row, base_url, api_key)
    raise KeyError("lost")


def lying(row, base_url, api_key):
    plain(row, base_url, api_key)
    return "good"


def leaving(row, base_url, api_key):
    plain(row, base_url, api_key)
    sys.exit(0)


def counting(row, base_url, api_key):
    plain(row, base_url, api_key)
    return 10**400


async def hanging(row, base_url, api_key):
    await asyncio.sleep(100)


failures = 0


def crashing_once(row, base_url, api_key):
    global failures
    failures += 1
    if failures == 1:
        raise OSError("no network")
    return plain(row, base_url, api_key)
"""


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str], FunctionAgent]:
    path = written(tmp_path, FUNCTIONS)
    return lambda name: FunctionAgent(f"{path}:{name}", "agent")


@pytest.mark.parametrize("name, reward", [("plain", 1.0), ("unblocked", 1.0), ("says_it_over_http", 0.5)])
def test_a_function_is_an_agent(function: Callable[[str], FunctionAgent], name: str, reward: float) -> None:
    made = trajectories(function(name), seeds=(5, 6, 7))
    assert [one.sample for one in made] == [0, 1, 2] and {one.reward for one in made} == {reward}
    assert {one.status for one in made} == {Status.COMPLETED}
    assert (made[0].numbers.get("extra") == 3) == (name == "unblocked")


def test_an_agent_whose_first_messages_leave_no_room_is_counted(function: Callable[[str], FunctionAgent]) -> None:
    """Where the policy has answered once, the conversation had room."""
    (opened,) = trajectories(function("plain"), positions=40)
    assert (opened.status, opened.numbers["without_room"], opened.turns) == (Status.TRUNCATED, 1, ())
    assert "tokens, which leaves no room for an answer: the model has 40 positions" in (opened.error or "")
    (grown,) = trajectories(function("plain"), positions=300)
    assert (grown.status, grown.numbers["without_room"], grown.error) == (Status.TRUNCATED, 0, None)
    assert grown.turns
    (endless,) = trajectories(function("endless"), positions=40)  # its messages are not tokenised to their end
    assert (endless.status, endless.numbers["without_room"]) == (Status.TRUNCATED, 1)
    assert "the messages have more than " in (endless.error or "")


def test_a_summary_is_a_branch(function: Callable[[str], FunctionAgent]) -> None:
    engine = ScriptedEngine(calculating)
    (made,) = trajectories(function("summing_up"), engine)
    assert len(made.branches) == 1 and made.numbers["branches"] == 2 and made.reward is None
    assert "A summary." in made.prompt.text and made.ends_in == 0
    assert [message["content"] for message in made.opened_with] == ["A summary."]
    assert len(made.messages) == 1 and made.last_turn is Status.COMPLETED
    trained = made.loss_mask.sum() + made.branches[0].loss_mask.sum()
    assert trained == sum(len(sampled) for _, sampled, _ in engine.seen)


def test_an_agent_that_asks_for_ever_is_truncated(function: Callable[[str], FunctionAgent]) -> None:
    (made,) = trajectories(function("asking_for_ever"), calls=5)
    assert made.status is Status.TRUNCATED and made.numbers["calls"] == 5 and made.loss_mask.any()


@pytest.mark.parametrize(
    "name, why",
    [
        ("crashing", "KeyError: 'lost'"),
        ("lying", "reward is 'good', which is no finite number"),
        ("leaving", "sys.exit(0)"),
        ("counting", "which is no finite number"),
        ("hanging", "did not end within 0.5 s"),
        ("never_asking", "without an answer of the policy"),
    ],
)
def test_an_agent_that_fails_is_run_again_and_then_masked_out(
    function: Callable[[str], FunctionAgent], name: str, why: str
) -> None:
    (made,) = trajectories(function(name), timeout_s=0.5 if name == "hanging" else 60)
    assert made.status is Status.ENVIRONMENT_ERROR and made.error is not None and why in made.error
    assert made.numbers == {"environment_retries": 2} and len(made.response_ids) == 0 and made.reward is None


def test_an_agent_that_fails_once_gets_a_fresh_session(function: Callable[[str], FunctionAgent]) -> None:
    (made,) = trajectories(function("crashing_once"))
    assert made.status is Status.COMPLETED and made.numbers["environment_retries"] == 1 and made.numbers["calls"] == 2


def test_a_command_that_fails_shows_why(tmp_path: Path) -> None:
    failing = command(written(tmp_path, 'print("x" * 100_000)\nsys.exit("the database is gone")'))
    (made,) = trajectories(failing)
    assert made.error is not None and "status 1: the database is gone" in made.error
    with pytest.raises(UserError, match="there is no program 'no-such-program'"):
        CommandAgent("no-such-program")


@pytest.mark.parametrize("last", ["print(10**400)", "print('[' * 100_000)"])
def test_a_command_may_end_with_any_line(tmp_path: Path, last: str) -> None:
    (made,) = trajectories(command(written(tmp_path, MAIN + last)))
    assert made.reward is None and made.status in (Status.COMPLETED, Status.ENVIRONMENT_ERROR)


def test_nobody_waits_for_what_a_command_has_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.rollout.agents._LAST_WORDS_S", 0.1)
    last = f"""
import subprocess
left = subprocess.Popen(["sleep", "60"], start_new_session=True)
open({str(tmp_path / "left")!r}, "w").write(str(left.pid))
print(0.5)
"""
    (made,) = trajectories(command(written(tmp_path, MAIN + last)), timeout_s=30)
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert made.reward == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_command_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.sh").write_text(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    code = f"""
import asyncio
from tandem.rollout.agents import Access, CommandAgent
asyncio.run(CommandAgent("sh {tmp_path}/endless.sh").run({{}}, "", Access("", "")))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        running.kill()
    while has_not_ended(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_not_ended(pid: int) -> bool:
    """A process of nobody's may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_command_is_killed_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    """A shell, which has started the other process at once."""
    (tmp_path / "agent.sh").write_text(f"sleep 1000 &\necho $! > {tmp_path}/child\nwait\n")
    (made,) = trajectories(CommandAgent(f"sh {tmp_path}/agent.sh"), timeout_s=3, retries=0)
    assert made.error is not None and "did not end within 3 s" in made.error
    assert_gone(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    leaving = f"""
import subprocess
open({str(tmp_path / "child")!r}, "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
print(1)
"""
    (made,) = trajectories(command(written(tmp_path, MAIN + leaving)))
    assert made.reward == 1
    assert_gone(int((tmp_path / "child").read_text()))


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError(f"process {pid} still runs")


def test_what_the_engine_raises_is_no_failure_of_the_agent(function: Callable[[str], FunctionAgent]) -> None:
    def broken(prompt: str) -> str:
        raise EngineError("the engine died")

    with pytest.raises(EngineError, match="the engine died"):
        trajectories(function("plain"), ScriptedEngine(broken))


def test_mistakes_in_the_configuration_are_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    with pytest.raises(UserError, match="no function of that name"):
        FunctionAgent(f"{path}:other", "conversation.environment.function")
    with pytest.raises(UserError, match="as JSON"):
        asyncio.run(CommandAgent("cat").run({"a": b"bytes"}, "", Access("", "")))


def test_no_more_agents_run_at_once_than_may(function: Callable[[str], FunctionAgent]) -> None:
    class Counting:
        running = most = 0

        async def run(self, *given: Any) -> AgentsWord:
            Counting.running += 1
            Counting.most = max(Counting.most, Counting.running)
            try:
                return await function("plain").run(*given)
            finally:
                Counting.running -= 1

    made = trajectories(Counting(), seeds=tuple(range(12)), at_once=3)
    assert Counting.most == 3 and all(one.reward == 1 for one in made)


def test_agents_outlive_an_event_loop_that_stands_still(
    function: Callable[[str], FunctionAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, which the loop of the engine does not run through; no limit passes meanwhile."""
    trained_s, clock = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + trained_s)
    loop = PausingEventLoop()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(work)

    agents = AgentConversations(function("plain"), limits(), a_policy(ScriptedEngine(calculating)), decode)
    run(agents.open())
    task = loop.create_task(agents.answer(PROMPT, [1, 2], SAMPLING))
    run(asyncio.sleep(0.01))
    trained_s = 100.0
    assert [made.reward for made in run(task)] == [1.0, 1.0]
    run(agents.close())
    loop.close()


def test_an_agent_that_is_cancelled_fails_nobody(function: Callable[[str], FunctionAgent]) -> None:
    async def cancelled() -> None:
        agents = AgentConversations(function("hanging"), limits(), a_policy(ScriptedEngine(calculating)), decode)
        await agents.open()
        task = asyncio.create_task(agents.answer(PROMPT, [1, 2], SAMPLING))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await agents.close()

    asyncio.run(cancelled())


def test_a_word_is_a_number_or_an_object_of_numbers() -> None:

    assert word_of(True, "") == AgentsWord(1.0) and word_of({"reward": None, "x": 1}, "") == AgentsWord(
        None, {"x": 1.0}
    )
    for wrong in (float("nan"), {"reward": "x"}, [1], {"x": None}):
        with pytest.raises(EnvironmentFailed):
            word_of(wrong, "the agent")
