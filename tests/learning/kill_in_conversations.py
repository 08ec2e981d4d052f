"""Trains with a tool that remembers, killed inside one of its calls and resumed. Prints what came of each CONFIG.

    python kill_in_conversations.py DIRECTORY STEPS CONFIG…

The tool is `counting.py` beside CONFIG, and a whole run is one process: conversations are under way when it dies. What
must hold of any run: each prompt is trained once an epoch; the tool has counted the calls of each trajectory from 1 on,
so that no conversation went on without its state; each token names a version that the bound allows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kill_and_resume import apart, check_epochs, child, finished, outcome

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.tracking.trajectories import read_trajectories, trajectories_path

KILL_AT = "KILL_AT_CALL"
"""Environment of the tool: the call in which it kills its process, counted from the start of the process."""
RECORDED = ("rollout_logprobs", "trainer_logprobs", "mismatch_max", "mismatch_at", "generation_s", "reward_s")
"""Columns whose last bits, or all of them, depend on which answers were decoded side by side, and when."""


def kill_at_call(number: int) -> Callable[[], None]:
    def arm() -> None:
        os.environ[KILL_AT] = str(number)

    return arm


def counts_in(row: dict[str, Any]) -> list[str]:
    """What the tool said."""
    return [message["content"] for message in json.loads(row["messages"]) if message["role"] == "tool"]


def check(run: Path, config: TrainConfig, steps: int) -> dict[str, int]:
    """Look at all that was trained. How many calls there were, and conversations across a publish."""
    seen = {"calls": 0, "turns across": 0, "within a turn": 0}
    used: list[int] = []
    for step in range(1, steps + 1):
        rows = read_trajectories(trajectories_path(run, step)).to_pylist()
        used += {row["group"]: row["prompt_index"] for row in rows}.values()
        for row in rows:
            said = counts_in(row)
            assert said == [str(number + 1) for number in range(len(said))], f"step {step}: the tool said {said}"
            seen["calls"] += len(said)
            turns = check_versions(row, step, config.trainer.max_staleness)
            seen["turns across"] += len({versions[0] for versions in turns}) > 1
            seen["within a turn"] += any(len(set(versions)) > 1 for versions in turns)
    check_epochs(used)
    return seen


def check_versions(row: dict[str, Any], step: int, max_staleness: int) -> list[list[int]]:
    """The versions of each turn of the policy."""
    versions, sampled = np.array(row["policy_versions"]), np.array(row["loss_mask"])
    assert (versions == -1).tolist() == (~sampled).tolist(), "what the policy made has a version, and nothing else"
    made = versions[sampled]
    assert (np.diff(made) >= 0).all() and made[-1] < step and made[0] >= step - 1 - max_staleness, f"{step}: {made}"
    if made[0] == step - 1:  # all of it by the weights that were trained
        assert (row["mismatch_max"] or 0.0) < 2e-5, f"step {step}: {row['mismatch_max']} nats from the trainer"
    ends = np.cumsum([turn["tokens"] for turn in row["turns"]])
    parts = np.split(versions, ends[:-1])
    return [part.tolist() for part, turn in zip(parts, row["turns"], strict=True) if turn["author"] == "policy"]


def tokens_and_weights(run: Path, steps: int) -> Any:
    """What does not depend on how long tools take, with trainer.max_staleness: 0."""
    files = [trajectories_path(run, step) for step in range(1, steps + 1)]
    return [read_trajectories(file).drop(RECORDED).to_pydict() for file in files], outcome(run, steps)["weights"]


def comparable(run: Path, config: TrainConfig, steps: int) -> Any:
    """What two runs of a configuration have alike."""
    if config.trainer.max_staleness == 0:
        return apart(tokens_and_weights, run, steps)
    return None if config.generation.partial_rollouts else apart(outcome, run, steps)


def survive(path: str, directory: Path, steps: int) -> str:
    config = apart(load_config, TrainConfig, path, [])
    whole, run = directory / "whole", directory / "killed"
    assert finished(child(["train", path, f"trainer.run_dir={whole}"]))
    seen = apart(check, whole, config, steps)
    process = child(["train", path, f"trainer.run_dir={run}"], kill_at_call(seen["calls"] // 2))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, "it was not killed in a call"
    assert finished(child(["train", "--resume", str(run)])), "the resumed run failed"
    again = apart(check, run, config, steps)
    assert comparable(run, config, steps) == comparable(whole, config, steps), "another outcome"
    for done in (whole, run):
        shutil.rmtree(done)
    found = [max(count, again[name]) for name, count in seen.items()]
    return "{} calls, {} turns across, {} within a turn".format(*found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for config_path in sys.argv[3:]:
        print(f"{Path(config_path).stem}: {survive(config_path, Path(sys.argv[1]), int(sys.argv[2]))}", flush=True)
