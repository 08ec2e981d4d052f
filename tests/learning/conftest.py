"""What several learning tests share."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.programs import PYTHON, run


def kill_and_resume(tree: dict[str, Any], directory: Path, steps: int, kills: int = 2, command: str = "train") -> None:
    """Run `tandem COMMAND` with this configuration of so many steps in `directory/whole`, and again, killed somewhere
    and resumed, `kills` times: all of them have the same outcome, or this fails."""
    config = directory / "killed.yaml"
    config.write_text(yaml.safe_dump(tree))
    program = str(Path(__file__).with_name("kill_and_resume.py"))
    done = run(
        [PYTHON, program, str(config), str(directory), str(steps), str(kills), "0", command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same outcome") == kills


@pytest.fixture(scope="module")
def every_role(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """recipes/sort4_ppo.yaml with actor, critic and reference, on an untrained model that is rewarded for digits."""
    directory = tmp_path_factory.mktemp("dataflows")
    (directory / "reward.py").write_text(
        "def digits(completion, ground_truth):\n    return sum(map(str.isdigit, completion)) / 8\n"
    )
    tree = yaml.safe_load((ROOT / "recipes/sort4_ppo.yaml").read_text())
    tree["model"] = {"path": str(shutil.copytree(sort4 / "model", directory / "model"))}
    described = directory / "model/config.json"  # transformers trains no embedding of padding, which it says here
    described.write_text(json.dumps(json.loads(described.read_text()) | {"pad_token_id": None}))
    tree["data"] |= {"train_files": [str(sort4 / "train.jsonl")], "val_files": [], "prompts_per_step": 10}
    tree["algorithm"] |= {"group_size": 3, "minibatches": 2, "kl": {"place": "reward", "coefficient": 0.05}}
    tree["training"]["tokens_per_micro_batch"] = 64
    tree["training"]["optimizer"]["warmup_steps"] = 2
    tree["reward"] = {"functions": [f"{directory}/reward.py:digits"], "workers": 1}
    tree["trainer"] = {}
    return tree


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the quickstart from nothing; its warmed model and task are in `run-warmup` beside it."""
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    run(
        [PYTHON, str(ROOT / "examples/sort4/quickstart.py"), "--seed", "0", "--run-dir", str(directory)],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return directory
