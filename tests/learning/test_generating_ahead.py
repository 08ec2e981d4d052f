"""A run that generates ahead of training loses nothing, doubles nothing and hangs nowhere, whatever dies or stops it.

Each of the programs that do it takes any number of times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SPLIT = {"pools": {"training": [1], "generation": [1]}, "roles": {"actor": "training", "rollout": "generation"}}
REWARDS = """
def digits(completion):
    return sum(map(str.isdigit, completion)) / 8

def many(completion):
    return float(sum(map(str.isdigit, completion)) > 2)
"""
GRPO: dict[str, Any] = {"type": "grpo", "group_size": 4, "minibatches": 2}
DAPO: dict[str, Any] = {"type": "dapo", "group_size": 4, "resample_rounds": 3}


@pytest.fixture
def recipe(grpo_config: Path, sort4: Path, tmp_path: Path) -> dict[str, Any]:
    """18 prompts in steps of 4: steps straddle epochs."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join((sort4 / "train.jsonl").read_text().splitlines(keepends=True)[:18]))
    (tmp_path / "reward.py").write_text(REWARDS)
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [str(few)], "val_files": [str(few)]}
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "workers": 1}
    tree["algorithm"] = GRPO
    tree["placement"] = SPLIT
    tree["trainer"] |= {"max_staleness": 2, "steps": 6, "eval_every": 3, "save_every": 2, "keep_trajectories": 0}
    return tree


def printed(program: str, tree: dict[str, Any], directory: Path, *arguments: str) -> str:
    config = directory / "ahead.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), str(config), str(directory), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("algorithm", "reward", "placement"),
    [
        pytest.param(GRPO, "digits", {}, id="grpo"),
        pytest.param(DAPO, "many", SPLIT, id="dapo, split", marks=pytest.mark.nightly),
    ],
)
def test_kills_change_nothing_where_publishes_wait(
    algorithm: dict[str, Any], reward: str, placement: dict[str, Any], recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["algorithm"], recipe["placement"] = algorithm, placement
    recipe["reward"]["functions"] = [f"{tmp_path}/reward.py:{reward}"]
    recipe["generation"]["partial_rollouts"] = False
    recipe["trainer"] |= {"max_staleness": 1}
    assert printed("kill_and_resume.py", recipe, tmp_path, "6", "2").count("same outcome") == 2


@pytest.mark.nightly
def test_lost_workers_cost_no_prompt_where_answers_go_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["trainer"] |= {"max_restarts": 100, "save_every": 1, "steps": 10}
    assert "tokens by staleness" in printed("lose_workers.py", recipe, tmp_path, "3")


@pytest.mark.nightly
def test_stops_and_failures_in_any_stage(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["generation"]["max_response_tokens"] = 24
    assert "3 disturbed" in printed("disturb_stages.py", recipe, tmp_path, "3", "2")
