"""Runs whose prompts depend on earlier answers, killed and resumed: the same rows, the same outcome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.tracking.trajectories import read_trajectories
from tests.learning.conftest import kill_and_resume

STEPS, PROMPTS_PER_STEP = 6, 4
OWN = '''
import json


class Rows:
    """The rows of the files, as they are."""

    def __init__(self, files):
        self.lines = files[0].read_text().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return json.loads(self.lines[index])


class Hardest:
    """Rows in turn; one that is answered with a mean reward below a third comes again."""

    def __init__(self, rows, rows_per_step, seed):
        self.rows, self.at, self.again = rows, 0, []

    def draw(self):
        if len(self.again) > 2:
            return self.again.pop(0)
        self.at += 1
        return (self.at - 1) % self.rows

    def update(self, outcomes):
        self.again += [one.row for one in outcomes if sum(one.rewards) < len(one.rewards) / 3]

    def state(self):
        return {"at": self.at, "again": list(self.again)}

    def load_state(self, state):
        self.at, self.again = state["at"], list(state["again"])
'''


@pytest.mark.parametrize("kind", [pytest.param("solve_rate", marks=pytest.mark.nightly), "own"])
def test_kills_change_nothing(kind: str, grpo_config: Path, sort4: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    rows = (sort4 / "train.jsonl").read_text().splitlines(keepends=True)[:9]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    tree: Any = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [str(tmp_path / "rows.jsonl")], "prompts_per_step": PROMPTS_PER_STEP}
    if kind == "solve_rate":  # with dropped groups
        tree["data"]["sampler"] = {"type": "solve_rate"}
        tree["algorithm"] = {"type": "grpo", "group_size": 4, "resample_rounds": 1}
    else:  # with prompts that are drawn ahead
        tree["data"] |= {"dataset": f"{tmp_path}/own.py:Rows"}
        tree["data"]["sampler"] = {"type": "own", "sampler": f"{tmp_path}/own.py:Hardest"}
        tree["generation"]["partial_rollouts"] = False
        tree["trainer"]["max_staleness"] = 1
    tree["trainer"] |= {"steps": STEPS, "eval_every": 0, "save_every": 2, "trajectories_every": 1}
    kill_and_resume(tree, tmp_path, STEPS)

    used = []
    for step in range(1, STEPS + 1):
        table = read_trajectories(tmp_path / f"whole/trajectories/step_{step:06d}.parquet")
        used.append(list(dict.fromkeys((row["group"], row["prompt_index"]) for row in table.to_pylist())))
    assert [len(of_step) for of_step in used] == [PROMPTS_PER_STEP] * STEPS
    drawn = [row for of_step in used for _, row in of_step]
    assert len(set(drawn)) < len(drawn), "some came again before the rest"
    state = json.loads(next((tmp_path / "whole/checkpoints").glob("step_*6/state/rl.json")).read_text())["sampler"]
    assert state["drawn"] >= STEPS * PROMPTS_PER_STEP and state["own"]
