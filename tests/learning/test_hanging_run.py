"""A rank that sleeps for ever while others wait for it in a collective ends the run, and says where each rank is."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from tests.programs import TANDEM, run

TIMEOUT_S = 25  # longer than ranks take to start on busy cores
ALGORITHM = """
import time
import torch.distributed as dist
from tandem.algorithms.builtin.opo import OPO
from tandem.algorithms.builtin.reinforce import ReinforceLoss

class SleepyLoss(ReinforceLoss):
    def surrogate(self, tokens):
        while dist.get_rank() == 1:
            time.sleep(1)
        return super().surrogate(tokens)

class SleepyOPO(OPO):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.loss = SleepyLoss(self.loss.config, self.config)
"""


def test_a_hanging_rank_ends_the_run_with_every_stack(grpo_config: Path, tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(ALGORITHM)
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    tree = yaml.safe_load(grpo_config.read_text())
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"]}
    tree["algorithm"] |= {"type": f"{tmp_path}/sleepy.py:SleepyOPO"}
    tree["cluster"] = {"ranks": 2, "timeout_s": TIMEOUT_S}
    tree["trainer"] |= {"max_restarts": 0}
    grpo_config.write_text(yaml.safe_dump(tree))
    done = run(
        [TANDEM, "train", str(grpo_config)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and f"{TIMEOUT_S}" in done.stderr, done.stderr
    assert "sleepy.py" in done.stderr and "in surrogate" in done.stderr  # where the sleeper is
    assert "main rank 0:" in done.stderr and "main rank 1:" in done.stderr
    assert "in backward" in done.stderr  # where the others wait for it
    assert "leaked" not in done.stderr
