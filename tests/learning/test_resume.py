"""A run that was killed and resumed equals the one that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.learning.conftest import kill_and_resume

EPOCHS, PROMPTS, PROMPTS_PER_STEP = 2, 18, 4
STEPS = EPOCHS * PROMPTS // PROMPTS_PER_STEP
"""Steps straddle epochs: 18 is no multiple of 4."""


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.nightly)])
def test_kills_change_nothing(kills: int, grpo_config: Path, sort4: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((sort4 / "train.jsonl").read_text().splitlines(keepends=True)[:PROMPTS]))
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [str(few)], "val_files": [str(few)], "prompts_per_step": PROMPTS_PER_STEP}
    tree["algorithm"] = {
        "type": "ppo",
        "group_size": 4,
        "minibatches": 2,
        "kl": {"place": "reward", "control": "adaptive", "coefficient": 0.1, "refresh_steps": 3, "refresh_share": 0.6},
        "critic_optimizer": {"lr": 1e-3},
        "critic_warmup_steps": 2,
    }
    tree["training"]["optimizer"] |= {"schedule": "cosine", "warmup_steps": 3}
    tree["trainer"] |= {"steps": STEPS, "eval_every": 3, "save_every": 2, "best_metric": "val/sort4/reward/mean@4"}
    kill_and_resume(tree, tmp_path, STEPS, kills=kills)
