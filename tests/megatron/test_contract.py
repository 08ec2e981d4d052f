"""The contract suite of TrainEngine on two ranks; tests/contract/test_training.py itself runs it on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tests.megatron.contract import LAYOUTS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script, directory = Path(__file__).with_name("contract.py"), tmp_path_factory.mktemp("contract")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    subprocess.run([sys.executable, str(script), str(directory)], env=environment, check=False)
    return directory


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_contract_holds(directory: Path, layout: str, rank: int) -> None:
    told = (directory / f"{layout}.{rank}.txt").read_text()
    assert re.search(r"^\d+ passed, \d+ deselected in", told, re.MULTILINE), told
