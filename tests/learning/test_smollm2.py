"""Recipes of a real model, SmolLM2-135M-Instruct, five steps each; scripts/smollm2 makes it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT

MODEL = ROOT / "models/smollm2-135m-instruct"
PUBLISHED = ROOT.parent / "shared/data"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (MODEL / "ORIGIN.md").is_file(), reason="scripts/smollm2 makes the model"),
]
RECIPES = {
    "sums": ("train", "sums/train.jsonl"),
    "form": ("train", "form/train.jsonl"),
    "gsm8k": ("train", "gsm8k/train.parquet"),
    "calculator_sft": ("sft", "products/sft.jsonl"),
    "calculator": ("train", "products/train.jsonl"),
    "sft": ("sft", "published/gsm8k_sft.jsonl"),
    "dpo": ("dpo", "published/hh_pairs.jsonl"),
    "kto": ("dpo", "published/hh_pairs.jsonl"),
}
"""The command, and the rows below `data`."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name in ("sums", "form", "products"):
        python("-m", f"examples.smollm2.{name}", directory / name)
    if PUBLISHED.is_dir():
        gsm8k, hh = PUBLISHED / "gsm8k/train.jsonl.gz", PUBLISHED / "hh_rlhf_helpful/pairs_4000.jsonl.gz"
        python("examples/smollm2/rows.py", directory / "published", "--gsm8k", gsm8k, "--hh", hh)
        assert main(["data", "gsm8k", "--in", str(PUBLISHED / "gsm8k"), "--out", str(directory / "gsm8k")]) == 0
    return directory


def python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_five_steps(recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, rows = RECIPES[recipe]
    if not (data / rows).is_file():
        pytest.skip(f"the published rows are not below {PUBLISHED}")
    arguments = [f"model.path={MODEL}", f"data.train_files=[{data / rows}]", f"trainer.run_dir={tmp_path}/run"]
    arguments += ["trainer.steps=5", "data.prompts_per_step=4" if command == "train" else "data.rows_per_step=8"]
    arguments += ["data.val_files=[]", "trainer.eval_every=0"] if command == "train" else []
    assert main([command, f"recipes/smollm2_{recipe}.yaml", *arguments]) == 0
    steps = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [record["step"] for record in steps][-5:] == [1, 2, 3, 4, 5]
    role = "actor" if command == "train" else command
    assert all(math.isfinite(record[f"{role}/grad_norm"]) for record in steps[-5:])
    if recipe in ("sums", "form"):  # without their fine-tuning no answer to the others is right, and nobody trains
        assert max(record["rollout/mismatch_max"] for record in steps[-5:]) < 1e-3
