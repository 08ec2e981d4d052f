"""What several test files share: the sort4 task, made once a session."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def load_file(path: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sort4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/` (untrained), `sft.jsonl`, `train.jsonl` and `val.jsonl`."""
    directory = tmp_path_factory.mktemp("sort4")
    load_file(ROOT / "examples/sort4/task.py").make(directory, seed=0)
    return directory


@pytest.fixture
def grpo_config(sort4: Path, tmp_path: Path) -> Path:
    """recipes/sort4_grpo.yaml on the untrained model: three steps into `tmp_path / "run"`."""
    tree = yaml.safe_load((ROOT / "recipes/sort4_grpo.yaml").read_text())
    tree["model"]["path"] = str(sort4 / "model")
    tree["data"] |= {"train_files": [str(sort4 / "train.jsonl")], "val_files": [str(sort4 / "val.jsonl")]}
    tree["data"] |= {"prompts_per_step": 4}
    tree["reward"] = {"functions": [f"{ROOT}/examples/sort4/reward.py:compute_score"]}
    tree["trainer"] = {"run_dir": str(tmp_path / "run"), "steps": 3}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
