"""Disturbs a run that generates ahead, each time in some way in some stage. Prints what came of it.

    python disturb_stages.py CONFIG DIRECTORY TIMES [seed]

The run must end as docs/runs.md says, or go on and end, within LIMIT_S, and leave no process behind; what it trained in
the end, resumed where it stopped, is looked at. A program of its own: it forks after expensive imports, which only a
process without threads may do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kill_and_resume import apart, child, lines
from lose_workers import check_trained

import tandem.controller.dataflow
import tandem.jobs.rl
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.controller.rollouts import RolloutProducer
from tandem.controller.scoring import GroupScoring
from tandem.jobs.rl import RlJob

LIMIT_S, LEFT_OVER_S = 120.0, 10.0
NOISE = ("was destroyed but it is pending", "never awaited", "Exception ignored", "leaked", "Traceback")
STAGES: dict[str, tuple[Any, str]] = {
    "take": (RolloutProducer, "take"),
    "to_preparation": (RolloutProducer, "to_preparation"),
    "learn": (tandem.controller.dataflow, "update"),
    "publish": (RolloutProducer, "publish"),
    "evaluation": (RlJob, "evaluate"),
    "save": (RlJob, "save"),
}
ENDS = {"Ctrl-C": {130}, "SIGTERM": {143}, "Ctrl-C twice": {1, 130}, "a rank dies": {0}, "a callback raises": {1}}
"""By fault, how the run ends. The first Ctrl-C of two may be all that is needed."""
REWARDS = {"a reward hangs": ("hang", {0}), "a reward raises": ("raise", {1})}
"""By fault, what the reward function is told, and how the run ends."""


def reward_function(directory: Path) -> str:
    """A reward that does once, when it is told to, what it should not."""
    path = directory / "told_reward.py"
    path.write_text(
        "import os, pathlib, time\n\n"
        f"told = pathlib.Path({str(directory / 'told')!r})\n\n\n"
        "def digits(completion):\n"
        "    try:\n"
        "        fault = told.read_text()\n"
        "        told.unlink()\n"
        "    except FileNotFoundError:\n"
        "        return sum(map(str.isdigit, completion)) / 8\n"
        "    if fault == 'hang':\n"
        "        time.sleep(3600)\n"
        "    raise RuntimeError('told so')\n"
    )
    return f"{path}:digits"


def strike(fault: str, told: Path, rng: random.Random) -> None:
    if fault in REWARDS:
        told.write_text(REWARDS[fault][0])
    elif fault == "a rank dies":
        ranks = [process for process in multiprocessing.active_children() if "rank" in process.name]
        os.kill(rng.choice(ranks).pid or 0, signal.SIGKILL)
    elif fault == "a callback raises":
        GroupScoring.take_scores = raises  # type: ignore[method-assign]
    else:
        os.kill(os.getpid(), signal.SIGTERM if fault == "SIGTERM" else signal.SIGINT)
    if fault == "Ctrl-C twice":
        time.sleep(rng.uniform(0, 0.3))
        os.kill(os.getpid(), signal.SIGINT)


def raises(*_: object) -> None:
    raise RuntimeError("told so")


def arm(stage: str, call: int, delay_s: float, act: Callable[[], None]) -> None:
    """`act` a moment after the `call`-th time that the run comes to the stage."""
    owner, name = STAGES[stage]
    original, calls = getattr(owner, name), 0

    def disturbed(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Timer(delay_s, act).start()
        return original(*arguments, **named)

    setattr(owner, name, disturbed)


def run(arguments: list[str], errors: Path, before: Callable[[], None] = lambda: None) -> tuple[int, float]:
    """Exit status and seconds of `tandem ARGUMENTS`, which must end and leave no process behind."""

    def prepare() -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        before()

    start, process = time.monotonic(), child(arguments, prepare)
    while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() - start > LIMIT_S:
            os.kill(process, signal.SIGABRT)
            raise AssertionError(f"{arguments} does not end; {errors.read_text()[-3000:]}")
        time.sleep(0.01)
    seconds, limit = time.monotonic() - start, time.monotonic() + LEFT_OVER_S
    while left_over():
        assert time.monotonic() < limit, f"{arguments} leaves processes behind: {left_over()}"
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1]), seconds


def left_over() -> list[str]:
    """What has become a child of this process, as its own parents have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            return []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200] for one in children]


def disturb(config: str, directory: Path, number: int, rng: random.Random) -> str:
    settings = load_config(TrainConfig, Path(config))
    path, stage = directory / f"run_{number}", rng.choice([*STAGES])
    fault = rng.choice([*ENDS, *REWARDS])
    call, delay_s = rng.randint(1, 2 if stage == "evaluation" else 4), rng.choice([0, rng.uniform(0, 0.2)])
    share = "1.0" if fault == "a reward hangs" else "0.0"
    arguments = ["train", config, f"trainer.run_dir={path}", f"reward.functions=[{reward_function(directory)}]"]
    arguments += [f"reward.max_error_share={share}", "reward.timeout_s=2", "trainer.max_restarts=1"]
    told, errors = directory / "told", directory / f"stderr_{number}"
    act = partial(strike, fault, told, random.Random(number))
    status, seconds = run(arguments, errors, partial(arm, stage, call, delay_s, act))
    what = f"{fault}, {stage} {call}, {delay_s * 1000:.0f} ms: status {status} after {seconds:.1f} s"
    expected = ENDS[fault] if fault in ENDS else REWARDS[fault][1]
    said = errors.read_text()
    late = told.exists() or (status == 0 and lines(path / "metrics.jsonl") >= (settings.trainer.steps or 0))
    assert status in expected or (late and status == 0), f"{what}\n{said[-3000:]}"
    if status in (0, 130, 143) and fault != "Ctrl-C twice":
        assert not [noise for noise in NOISE if noise in said], f"{what}\n{said[-3000:]}"
    told.unlink(missing_ok=True)
    if status != 0:
        status, _ = run(["train", "--resume", str(path)], errors)
        assert status == 0, f"{what}; resumed: {status}\n{errors.read_text()[-3000:]}"
    return f"{what}; {apart(check_trained, path, settings)}"


def main(config: str, directory: Path, times: int, seed: int) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of the runs become this process's
    rng, start = random.Random(seed), time.monotonic()
    for number in range(times):
        print(f"{number + 1}: {disturb(config, directory, number, rng)}", flush=True)
    print(f"{times} disturbed, done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
