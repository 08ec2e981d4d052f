"""The programs of docs/python.md run as they are shown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests import programs
from tests.conftest import ROOT
from tests.programs import PYTHON

PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
RUN, BRIEF, ENOUGH, TELLING, REINFORCE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(program: str, directory: Path, *arguments: str) -> str:
    """What a program of the page prints, from a file in `directory` and with that as its working directory."""
    (directory / "program.py").write_text(program)
    command = [PYTHON, "program.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def recipe(grpo_config: Path, tmp_path: Path) -> Path:
    return grpo_config.rename(tmp_path / "recipe.yaml")


def test_a_run(recipe: Path, tmp_path: Path) -> None:
    run(RUN, tmp_path)
    assert [record["step"] for record in read_metrics(tmp_path / "runs/first/metrics.jsonl")] == [1, 2]


def test_objects_in_the_place_of_files(recipe: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(recipe.read_text())
    run(BRIEF.replace("import tandem\n", f"import tandem\n\nOTHERS = {tree!r}\n", 1), tmp_path)
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(records) == 3 and all(record["reward/mean"] * 32 in range(33) for record in records)
    assert sorted(path.name for path in (tmp_path / "run/objects").iterdir()) == ["brief.pkl", "data.train_files.jsonl"]


def test_callbacks(recipe: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(recipe.read_text())
    tree["trainer"] |= {"eval_every": 1, "steps": 3}
    recipe.write_text(yaml.safe_dump(tree))
    printed = run(ENOUGH, tmp_path)
    assert all(f"validated {step}: ['val/" in printed for step in range(3)) and "validated 3" not in printed
    assert f"saved {tmp_path}/run/checkpoints/step_000002/model" in printed
    assert "is enough: stopping after this step" in printed and ": stopped at step 2" in printed


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_worker_of_ones_own(recipe: Path, tmp_path: Path, ranks: int) -> None:
    printed = run(TELLING, tmp_path, "recipe.yaml", "trainer.run_dir=runs/second", f"cluster.ranks={ranks}")
    for rank in range(ranks):
        assert len(re.findall(rf"rank {rank}: \d+ rows, gradient norm", printed)) == 3, printed
    assert len(re.findall(r"row \d+: ['\"]", printed)) >= 3 * 4, printed
    assert [record["step"] for record in read_metrics(tmp_path / "runs/second/metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_dataflow_of_ones_own_learns(recipe: Path, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "digits.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    tree = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**tree, "reward": {"functions": [str(tmp_path / "digits.py:digits")]}}))
    arguments = ["data.prompts_per_step=16", "trainer.steps=12", f"cluster.ranks={ranks}"]
    printed = run(REINFORCE, tmp_path, "recipe.yaml", "trainer.run_dir=runs/third", *arguments)
    rewards = [float(value) for value in re.findall(r"reward (\S+),", printed)]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]), rewards
    out = tmp_path / "metrics.json"
    assert main(["eval", str(recipe), f"model.path={tmp_path}/runs/third", f"--out={out}"]) == 0
    assert "val/sort4/reward/mean@4" in json.loads(out.read_text())
