"""The program of docs/ppo_by_hand.md: as it is shown, and with the numbers of `tandem train`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT
from tests.learning.test_python_page import run

PROGRAM = re.findall(r"```python\n(.*?)```", (ROOT / "docs/ppo_by_hand.md").read_text(encoding="utf-8"), re.DOTALL)[0]
SAME = [
    "algorithm={type: ppo, gae_lambda: 0.95, epochs: 2, value_clip: null, critic_optimizer: {lr: 1e-3}}",
    "data.prompts_per_step=16",
    "trainer.steps=5",
]


def test_it_is_what_tandem_train_does(grpo_config: Path, tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    same = [*SAME, f"reward.functions=['{tmp_path}/digits.py:digits']"]
    assert main(["train", str(grpo_config), *same, f"trainer.run_dir={tmp_path}/theirs"]) == 0
    theirs = read_metrics(tmp_path / "theirs/metrics.jsonl")
    printed = run(PROGRAM, tmp_path, str(grpo_config), *same, f"trainer.run_dir={tmp_path}/ours", "cluster.ranks=2")
    ours = [float(reward) for reward in re.findall(r"reward (\S+) ", printed)]
    assert len(ours) == 5 and ours == pytest.approx([record["reward/mean"] for record in theirs], abs=1e-6)
    assert "'actor/clip_fraction': '0." in printed and "'critic/vf_loss': '0." in printed
    start = weights(Path(yaml.safe_load(grpo_config.read_text())["model"]["path"]))
    end, expected = (weights(tmp_path / name / "checkpoints/step_000005/model") for name in ("ours", "theirs"))
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    apart = max((expected[name] - end[name]).abs().max().item() for name in start)
    assert moved > 1e-3 and apart < 0.02 * moved, (moved, apart)


def weights(model: Path) -> dict[str, torch.Tensor]:
    """Those of a model directory, whatever number of files it has."""
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
