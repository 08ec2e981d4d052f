"""A run whose workers die goes on from its last checkpoint by itself, and ends as the undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

STEPS = 8


@pytest.mark.parametrize(
    ("cluster", "losses"),
    [
        pytest.param({"ranks": 2}, 1, id="a process"),
        pytest.param({"ranks": 2}, 4, id="processes", marks=pytest.mark.nightly),
        pytest.param({"type": "ray", "ranks": 1}, 1, id="a node", marks=pytest.mark.nightly),
    ],
)
def test_losses_change_nothing(cluster: dict[str, Any], losses: int, grpo_config: Path, tmp_path: Path) -> None:
    """`lose_workers.py` takes any number of losses."""
    tree = yaml.safe_load(grpo_config.read_text())
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "workers": 1}
    tree["trainer"] |= {"steps": STEPS, "save_every": 2, "max_restarts": 2}
    tree["cluster"] = cluster
    config = tmp_path / "lost.yaml"
    config.write_text(yaml.safe_dump(tree))
    script = Path(__file__).with_name("lose_workers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(config), str(tmp_path), str(losses)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("same outcome") == losses
