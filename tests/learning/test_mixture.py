"""A mixture of three sets 5:3:2, killed and resumed: the same rows in the same order, each as often as it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import yaml

from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories

ROWS = {"long": 13, "middle": 5, "short": 2}
STEPS, PROMPTS_PER_STEP = 6, 5


def test_kills_change_nothing_and_each_row_is_used_as_often_as_it_should_be(
    grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    lines = iter((sort4 / "train.jsonl").read_text().splitlines(keepends=True))
    sets = {}
    for (name, rows), weight in zip(ROWS.items(), (5, 3, 2), strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(next(lines) for _ in range(rows)))
        sets[name] = {"files": [str(tmp_path / f"{name}.jsonl")], "weight": weight}
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [], "mixture": sets, "prompts_per_step": PROMPTS_PER_STEP}
    tree["trainer"] |= {"steps": STEPS, "eval_every": 0, "save_every": 2, "trajectories_every": 1}
    config = tmp_path / "killed.yaml"
    config.write_text(yaml.safe_dump(tree))
    program = str(Path(__file__).with_name("kill_and_resume.py"))
    done = subprocess.run(
        [sys.executable, program, str(config), str(tmp_path), str(STEPS), "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same outcome") == 2

    used: Counter[int] = Counter()
    for step in range(1, STEPS + 1):
        table = read_trajectories(tmp_path / f"whole/trajectories/step_{step:06d}.parquet")
        used.update({row["group"]: row["prompt_index"] for row in table.to_pylist()}.values())
    first = 0
    for (name, rows), draws in zip(ROWS.items(), (15, 9, 6), strict=True):
        counts = [used[row] for row in range(first, first + rows)]
        assert sum(counts) == draws and max(counts) - min(counts) <= 1, name
        first += rows
    last = read_metrics(tmp_path / "whole/metrics.jsonl")[-1]
    assert [last[f"mixture/{name}/epoch"] for name in ROWS] == [15 / 13, 9 / 5, 6 / 2]
    assert all(f"mixture/{name}/reward" in last for name in ROWS)
