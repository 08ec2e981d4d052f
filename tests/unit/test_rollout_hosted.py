"""Environments in processes of their own: the real libraries, one that hangs, one that dies, generators of each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import ConversationConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply
from tandem.rollout.environments.episodes import need_package
from tandem.rollout.environments.hosted import HostedEnvironments
from tandem.rollout.make import make_environments
from tandem.types import Prompt

OWN = """
import os, random, sys, time
import numpy as np

class Dice:
    '''Throws two dice with the generators that everybody shares.'''
    def __init__(self, sides=6):
        self.sides = sides
    def reset(self, seed=None, options=None):
        random.seed(1 if options and options.get("reseed") else seed)
        return f"{os.getpid()} {self._throw()}", {}
    def step(self, action):
        if action == "hang":
            time.sleep(1000)
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise ValueError("no such square")
        if action == "slow":
            time.sleep(0.3)
        if action == "print":
            print("said to nobody")
        if action == "number":
            return 7, 0.0, False, False, {}
        return self._throw(), float(action == "win"), action == "win", action == "cut", {}
    def _throw(self):
        return f"{random.randrange(self.sides)} {np.random.randint(self.sides)}"

class Spaced(Dice):
    from gymnasium.spaces import Text
    observation_space, action_space = Text(100), Text(3, charset="abc ")
    def close(self):
        print("closed", file=sys.stderr)
"""
MASTERMIND = {"type": "textarena", "environment": "Mastermind-v0", "processes": 1}


def prompt(**row: Any) -> Prompt:
    return Prompt(5, np.zeros(1, np.int32), "?", "default", None, {"prompt": "Play.\n", **row})


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "own.py").write_text(OWN)
    return {"type": "gymnasium", "environment": f"{tmp_path}/own.py:Dice", "processes": 1, "timeout_s": 20}


def environments_of(config: dict[str, Any]) -> HostedEnvironments:
    made = make_environments(ConversationConfig.model_validate({"environment": config}).environment)
    assert isinstance(made, HostedEnvironments)
    return made


def with_open(config: dict[str, Any], use: Callable[[HostedEnvironments], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        environments = environments_of(config)
        await environments.open()
        try:
            return await use(environments)
        finally:
            await environments.close()

    return asyncio.run(run())


def play(config: dict[str, Any], row: dict[str, Any], *answers: str) -> tuple[str, list[Reply], float | None]:
    """The opening, the replies, and what closing gave."""

    async def use(environments: HostedEnvironments) -> tuple[str, list[Reply], float | None]:
        environment = environments.make(prompt(**row))
        (message,) = await environment.start(prompt(**row))
        replies = [await environment.step(Answer(text)) for text in answers]
        return message["content"], replies, await environment.close()

    return with_open(config, use)


def said(reply: Reply) -> str:
    (message,) = reply.messages
    assert message["role"] == "user"
    return message["content"]


def pid_of(opening: str) -> int:
    return int(opening.split()[1])


def has_ended(pid: int) -> bool:
    """Also one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_game_of_textarena_says_each_thing_once_and_its_reward_is_the_last_turn_s() -> None:
    opening, replies, closing = play(MASTERMIND, {"seed": 3}, "[1 2 3 4]", "foo", "foo")
    assert opening.startswith("Play.\n[GAME] You are playing Mastermind.")
    assert said(replies[0]).startswith("[Player] [1 2 3 4]\n[GAME] Submitted [1 2 3 4]. Feedback:")
    assert said(replies[1]).startswith("[Player] [foo]\n[GAME] You attempted an invalid move.")
    assert not replies[2].messages and replies[2].reward == 0.375, "a second invalid move ends this game"
    assert [reply.reward for reply in replies[:2]] == [None, None] and closing is None


def test_a_game_that_is_cut_short_has_earned_nothing() -> None:
    assert play(MASTERMIND, {"seed": 3})[2] == 0.0
    assert play(MASTERMIND, {"seed": 3}, "[1 2 3 4]")[2] == 0.0


@pytest.mark.parametrize(
    ("answer", "reward"), [("<answer>24</answer>", 1.0), ("<answer>25</answer>", 0.0), ("24", 0.0)]
)
def test_a_task_of_reasoning_gym_is_one_question_and_a_score(answer: str, reward: float) -> None:
    numbers = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = {"type": "reasoning_gym", "dataset": "chain_sum", "arguments": numbers, "answer_tag": "answer"}
    first = play({**config, "processes": 1}, {"seed": 1})[0]
    question = first.rpartition("problem: ")[2].removesuffix(" =")
    right = str(eval(question))  # of digits and signs
    opening, (reply,), closing = play({**config, "processes": 1}, {"seed": 1}, answer.replace("24", right))
    assert opening == first and (reply.messages, reply.reward, closing) == ((), reward, None)


def test_a_row_s_options_are_laid_over_the_arguments() -> None:
    config = {"type": "reasoning_gym", "dataset": "chain_sum", "arguments": {"max_terms": 2}, "processes": 1}
    opening = play(config, {"seed": 1, "options": {"min_terms": 9, "max_terms": 9, "min_digits": None}})[0]
    assert opening.count("+") + opening.count("-") >= 8


def test_an_environment_of_gymnasium_gives_rewards_by_turn_until_it_ends(own: dict[str, Any]) -> None:
    opening, replies, closing = play(own, {"seed": 3}, "a", "print", "win")
    draw = random.Random(3)
    assert opening.split()[2] == str(draw.randrange(6)) and said(replies[0]).split()[0] == str(draw.randrange(6))
    assert [reply.reward for reply in replies] == [0.0, 0.0, 1.0] and closing is None
    assert not replies[2].messages and not play(own, {"seed": 3}, "cut")[1][0].messages
    assert play({**own, "arguments": {"sides": 1}}, {"seed": 3}, "a")[1][0].messages[0]["content"] == "0 0"


def test_what_is_no_action_is_told_and_changes_nothing(own: dict[str, Any]) -> None:
    spaced = {**own, "environment": own["environment"].replace("Dice", "Spaced")}
    _, plain, _ = play(spaced, {"seed": 3}, "a", "b")
    _, replies, _ = play(spaced, {"seed": 3}, "a", "", "abcd", "a.?", "b")
    assert [said(replies[0]), said(replies[4])] == [said(reply) for reply in plain]
    assert [said(reply) for reply in replies[1:4]] == [
        "error: no action: it has 0 characters, not 1 to 3",
        "error: no action: it has 4 characters, not 1 to 3",
        "error: no action: it holds '.', '?'; allowed are the characters ' abc'",
    ]
    assert [reply.reward for reply in replies[1:4]] == [None] * 3


def test_episodes_depend_on_their_rows_alone_whatever_else_draws_in_their_process(own: dict[str, Any]) -> None:
    """Each is as if it had been played alone, though one of them seeds the generators that all share."""
    rows = [{"seed": 3}, {"seed": 4}, {"seed": 3, "options": {"reseed": True}}, {"seed": 2**40}]
    turns = 4

    async def together(environments: HostedEnvironments) -> list[list[str]]:
        made = [environments.make(prompt(**row)) for row in rows]
        heard: list[list[str]] = [[] for _ in rows]
        order = [place for place in range(len(rows)) for _ in range(turns + 1)]
        random.Random(0).shuffle(order)
        for place in order:
            if heard[place]:
                heard[place].append(said(await made[place].step(Answer("a"))))
            else:
                (message,) = await made[place].start(prompt(**rows[place]))
                heard[place].append(message["content"].partition(" ")[2])
        return heard

    async def alone(environments: HostedEnvironments, row: dict[str, Any]) -> list[str]:
        environment = environments.make(prompt(**row))
        (message,) = await environment.start(prompt(**row))
        return [message["content"].partition(" ")[2]] + [
            said(await environment.step(Answer("a"))) for _ in range(turns)
        ]

    mixed = with_open(own, together)
    for row, heard in zip(rows, mixed, strict=True):
        one = with_open(own, lambda environments, row=row: alone(environments, row))
        assert [text.split()[-2:] for text in heard] == [text.split()[-2:] for text in one]


@pytest.mark.parametrize(
    ("action", "why"), [("hang", "a call took longer than 0.5 s"), ("die", "exit status 3 in a call")]
)
def test_a_process_that_hangs_or_dies_fails_those_in_it_and_is_replaced(
    own: dict[str, Any], action: str, why: str
) -> None:
    async def use(environments: HostedEnvironments) -> tuple[int, int]:
        bad, other, next_one = (environments.make(prompt()) for _ in range(3))
        (opening,) = await bad.start(prompt())
        await other.start(prompt())
        if action == "hang":
            for host in environments._hosts:
                host._config = environments._config.model_copy(update={"timeout_s": 0.5})
        with pytest.raises(EnvironmentFailed, match=why):
            await bad.step(Answer(action))
        with pytest.raises(EnvironmentFailed, match=why):
            await other.step(Answer("a"))
        await bad.close()
        await other.close()
        (again,) = await next_one.start(prompt())
        assert said(await next_one.step(Answer("a")))
        return pid_of(opening["content"]), pid_of(again["content"])

    old, new = with_open(own, use)
    assert old != new and has_ended(old) and has_ended(new), "the second ended when all were closed"


def test_what_the_library_raises_fails_that_environment_alone(own: dict[str, Any]) -> None:
    async def use(environments: HostedEnvironments) -> None:
        bad, other = (environments.make(prompt()) for _ in range(2))
        await bad.start(prompt())
        await other.start(prompt())
        with pytest.raises(EnvironmentFailed, match="ValueError: no such square"):
            await bad.step(Answer("raise"))
        with pytest.raises(EnvironmentFailed, match="observes int, not text"):
            await bad.step(Answer("number"))
        assert said(await other.step(Answer("a")))

    with_open(own, use)


def test_many_wait_for_one_process_and_only_their_own_call_counts(own: dict[str, Any]) -> None:
    async def use(environments: HostedEnvironments) -> None:
        made = [environments.make(prompt()) for _ in range(12)]
        await asyncio.gather(*(environment.start(prompt()) for environment in made))
        await asyncio.gather(*(environment.step(Answer("slow")) for environment in made))

    with_open({**own, "timeout_s": 3}, use)


def test_a_caller_that_leaves_does_not_shift_answers(own: dict[str, Any]) -> None:
    async def use(environments: HostedEnvironments) -> tuple[list[str], list[str]]:
        one, two = (environments.make(prompt()) for _ in range(2))
        await one.start(prompt(seed=3))
        await two.start(prompt(seed=3))
        leaving = asyncio.create_task(one.step(Answer("slow")))
        await asyncio.sleep(0.1)
        leaving.cancel()
        heard = [said(await two.step(Answer("a"))) for _ in range(3)]
        return heard, [said(await one.step(Answer("a"))) for _ in range(2)]

    heard, rest = with_open(own, use)
    assert heard[1:] == rest, "the call that was left was made"


def test_instances_are_spread_over_the_processes(own: dict[str, Any]) -> None:
    async def use(environments: HostedEnvironments) -> list[int]:
        made = [environments.make(prompt()) for _ in range(4)]
        opened = [await environment.start(prompt()) for environment in made]
        return [pid_of(messages[0]["content"]) for messages in opened]

    pids = with_open({**own, "processes": 2}, use)
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]


def test_processes_end_with_a_parent_that_is_killed_in_a_call(own: dict[str, Any], tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio
        from tests.unit.test_rollout_hosted import Answer, prompt, with_open
        async def use(environments):
            environment = environments.make(prompt())
            (message,) = await environment.start(prompt())
            print(message["content"], flush=True)
            await environment.step(Answer("hang"))
        with_open({own!r}, use)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert parent.stdout is not None
    parent.stdout.readline()
    child = int(parent.stdout.readline().split()[0])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while not has_ended(child):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seed": "three"}, "data row 5: column `seed` is 'three', not a whole number from 0"),
        ({"seed": -1}, "column `seed` is -1"),
        ({"options": "hard"}, "column `options` is 'hard', not an object"),
        ({"options": {"when": np.float32(1)}}, "column `options` is no JSON"),
    ],
)
def test_rows_that_cannot_be_used_are_told(own: dict[str, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        play(own, row)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "textarena", "environment": "TicTacToe-v0"}, "TicTacToe-v0 cannot be played by one player"),
        ({"type": "textarena", "environment": "Nim"}, "Environment Nim not found"),
        ({"type": "reasoning_gym", "dataset": "chains"}, "data set 'chains'.*not registered"),
        ({"type": "reasoning_gym", "dataset": "chain_sum", "arguments": {"terms": 3}}, "unexpected keyword.*'terms'"),
        ({"type": "gymnasium", "environment": "CartPole-v1"}, "CartPole-v1: observation_space is Box.*, not Text"),
        ({"type": "gymnasium", "environment": "Gone-v0"}, "Gone-v0 cannot be made: NameNotFound"),
        ({"type": "gymnasium", "environment": "gone.py:World"}, "there is no file .*gone.py"),
    ],
)
def test_what_cannot_be_used_is_told_before_the_first_row(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"conversation.environment .type: {config['type']}.: (?s:.*){message}"):
        play({**config, "processes": 1}, {})


def test_a_class_that_is_not_there_is_told(own: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="there is no class or function"):
        play({**own, "environment": own["environment"].replace("Dice", "Cards")}, {})


def test_a_library_that_is_not_installed_is_told() -> None:
    with pytest.raises(UserError, match=r"type: textarena: needs the package no_such, .*'\.\[textarena\]'"):
        need_package("no_such", "textarena")
