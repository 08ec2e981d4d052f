"""Runs a training again and again, killed at some point and resumed. Prints `done` when every one ended the same.

    python kill_and_resume.py CONFIG DIRECTORY STEPS [kills] [seed] [command]

A program of its own: it forks after the expensive imports, which only a process without threads may do.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch

import tandem.checkpoint.store
import tandem.jobs.preference
import tandem.jobs.rl
import tandem.jobs.sft
from tandem.cli import main
from tandem.data.sampler import Sampler
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories

T = TypeVar("T")
KILLS, AT_A_SAVE = 10, 5
"""Of so many kills one is in the middle of a checkpoint."""
OF_THE_CLOCK = ("generation_s", "reward_s")
"""Columns of trajectories that no two runs have alike."""


def child(arguments: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Fork `tandem ARGUMENTS`; returns the process id."""
    process = os.fork()
    if process:
        return process
    try:
        before()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(arguments))
    except BaseException:  # noqa: BLE001  whatever it is, a forked child must not return
        traceback.print_exc()
        os._exit(1)


def apart(function: Callable[..., T], *arguments: object) -> T:
    """What it returns in a fork: threads that it starts, as reading Parquet does, are none of this process's."""
    ours, theirs = os.pipe()
    process = os.fork()
    if not process:
        try:
            with os.fdopen(theirs, "wb") as file:
                pickle.dump(function(*arguments), file)
            os._exit(0)
        except BaseException:  # noqa: BLE001  as above
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        returned = file.read()
    assert finished(process), f"{function.__name__}{arguments}"
    return pickle.loads(returned)


def finished(process: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def kill_at_save(nth: int) -> Callable[[], None]:
    """The process kills itself inside its `nth` checkpoint, files written and not yet moved into place."""

    def arm() -> None:
        original = tandem.checkpoint.store.sync_tree
        calls = 0

        def sync_tree(directory: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            original(directory)

        tandem.checkpoint.store.sync_tree = sync_tree

    return arm


def record_rows(path: Path) -> Callable[[], None]:
    """The rows that the process draws are written to `path`, a line a step."""

    def arm() -> None:
        original = Sampler.__next__

        def draw(sampler: Sampler) -> list[int]:
            rows = original(sampler)
            with path.open("a") as file:
                print(*rows, file=file)
            return rows

        Sampler.__next__ = draw  # type: ignore[method-assign]

    return arm


def outcome(run: Path, steps: int) -> dict[str, Any]:
    """What must not depend on kills."""
    numbers = [
        {name: value for name, value in record.items() if not name.startswith(("time/", "perf/"))}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    weights = {
        str(path.relative_to(checkpoint)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        if path.suffix == ".safetensors"
    }
    if not (run / "trajectories").is_dir():
        return {"numbers": numbers, "weights": weights}
    tables = [read_trajectories(run / f"trajectories/step_{step:06d}.parquet") for step in range(1, steps + 1)]
    answers = [sha256(repr(table.drop(OF_THE_CLOCK).to_pydict()).encode()).hexdigest() for table in tables]
    used = [
        [*{row["group"]: row["prompt_index"] for row in table.select(["group", "prompt_index"]).to_pylist()}.values()]
        for table in tables
    ]
    return {"numbers": numbers, "weights": weights, "answers": answers, "used": used}


def check_epochs(rows: list[int]) -> None:
    """Each prompt comes once an epoch, the last one of which may not be complete."""
    length = len(set(rows))
    for first in range(0, len(rows), length):
        epoch = rows[first : first + length]
        assert len(set(epoch)) == len(epoch), f"a prompt comes twice in the epoch that begins at draw {first}"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_all(
    config: str, directory: Path, steps: int, kills: int = KILLS, seed: int = 0, command: str = "train"
) -> None:
    def arguments(run: Path) -> list[str]:
        return [command, config, f"trainer.run_dir={run}"]

    start = time.monotonic()
    assert finished(child(arguments(directory / "whole"), record_rows(directory / "rows.txt")))
    seconds = time.monotonic() - start
    expected = apart(outcome, directory / "whole", steps)
    critic = "critic_optimizer" in Path(config).read_text()
    learned = [name for name in expected["weights"] if "rollouts" not in name]
    moves = "refresh_steps" in Path(config).read_text()
    assert len(learned) == (4 if critic else 2) + moves, "of each model weights and optimizer; a reference's weights"
    if not any(word in Path(config).read_text() for word in ("resample_rounds", "mixture", "sampler")):
        check_epochs([row for rows in expected["used"] for row in rows])
    rng = random.Random(seed)
    for kill in range(kills):
        run = directory / f"killed_{kill}"
        if kill % AT_A_SAVE == 0:
            os.waitpid(child(arguments(run), kill_at_save(1 + rng.randrange(steps // 3))), 0)
        else:
            process, step = child(arguments(run)), rng.randrange(steps)
            while lines(run / "metrics.jsonl") < step:
                assert os.waitpid(process, os.WNOHANG)[0] == 0, f"kill {kill}: the run ended before step {step}"
                time.sleep(0.005)
            time.sleep(rng.uniform(0, seconds / steps))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        reached = len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
        resume = [command, "--resume", str(run)] if (run / "config.yaml").exists() else arguments(run)
        assert finished(child(resume)), f"kill {kill}: the resumed run failed"
        assert apart(outcome, run, steps) == expected, f"kill {kill}: another outcome"
        print(f"kill {kill}: after {reached} of {steps} steps, same outcome", flush=True)
        shutil.rmtree(run)
    print("done")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]), *sys.argv[6:])
