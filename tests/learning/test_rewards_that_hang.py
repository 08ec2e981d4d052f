"""A run whose rewards hang, and that is to stop: it ends soon, with the checkpoint of the step before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tandem.tracking.jsonl import read_metrics
from tests.endpoint import wait_until
from tests.programs import TANDEM, Program

REWARD = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def digits(completion):
    if (HERE / "run/checkpoints/step_000002").exists():
        (HERE / "hangs").touch()
        time.sleep(3600)
    return sum(map(str.isdigit, completion)) / 8
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_to_stop_waits_no_longer_for_rewards_that_hang(
    grpo_config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    tree = yaml.safe_load(grpo_config.read_text())
    tree["reward"] = {"functions": [f"{tmp_path}/reward.py:digits"], "timeout_s": 3600, "workers": 1}
    tree["trainer"] |= {"steps": 30, "save_every": 2}
    grpo_config.write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Program([TANDEM, "train", str(grpo_config)], env=environment, stdout=-1, stderr=-2, text=True) as job:
        wait_until((tmp_path / "hangs").exists)
        asked = time.monotonic()
        os.kill(job.pid, number)
        said, _ = job.communicate(timeout=120)
    last = max(one["step"] for one in read_metrics(tmp_path / "run/metrics.jsonl"))
    assert job.returncode == 128 + number, said
    assert f"{number.name}: step {last + 1} is given up" in said, said
    assert (tmp_path / f"run/checkpoints/step_{last:06}").is_dir()
    assert time.monotonic() - asked < 100
