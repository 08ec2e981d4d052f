"""Reward functions that misbehave on command: what test_reward_workers.py runs in workers."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any


def f(completion: str) -> Any:
    print("a reward function that talks", completion)
    return DEEDS[completion]() if completion in DEEDS else float(completion)


async def g(completion: str) -> float:
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return 2.0


def draw(completion: str) -> float:
    return random.random()


def _refuse() -> None:
    raise ValueError("no reward for this one")


def _leave_a_child_and_exit() -> None:
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(4)


DEEDS: dict[str, Callable[[], Any]] = {
    "raise": _refuse,
    "hang": lambda: time.sleep(3600),
    "hang with a child": lambda: subprocess.run(["sleep", "3600"]),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave a child and exit": _leave_a_child_and_exit,
    "pid": os.getpid,
    "big": lambda: {"score": 1, "pred": "x" * 1_000_000},
}
