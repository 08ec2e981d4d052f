"""The contract suite of TrainEngine on two ranks; tests/contract/test_training.py itself runs it on one."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is in .venv-megatron (scripts/megatron-env) only", allow_module_level=True)

from tests.megatron.conftest import RunScript
from tests.megatron.contract import LAYOUTS

QUICK = "pp2vpp2"


@pytest.fixture(scope="module")
def directory(run_script: RunScript, nightly: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contract")
    if nightly:
        run_script("contract", str(directory), list(LAYOUTS), "float32 or critic")
    else:
        run_script("contract", str(directory), [QUICK], "float32")
    return directory


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == QUICK else pytest.mark.nightly) for name in LAYOUTS]
)
def test_the_contract_holds(directory: Path, layout: str, rank: int) -> None:
    told = (directory / f"{layout}.{rank}.txt").read_text()
    assert re.search(r"^\d+ passed, \d+ deselected in", told, re.MULTILINE), told
