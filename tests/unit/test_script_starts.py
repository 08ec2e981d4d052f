"""How examples/grpo_trainer and examples/ppo_trainer start the command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

GIVEN = {"MODEL_PATH": "m", "DATA_DIR": "d", "RAY_ADDRESS": "a:1"}


def run(script: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Where PATH has no tandem."""
    environment = {"PATH": "/usr/bin:/bin", **GIVEN, **given}
    return subprocess.run(["sh", script, "key=1"], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*_trainer/*.sh")))
def test_a_script_finds_the_clones_environment_and_plans_when_it_is_asked_to(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / name, script)
    alone = run(script)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr == f"{script}: tandem is not installed: run scripts/setup in the clone\n"
    command = tmp_path / ".venv/bin/tandem"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    trains, plans = run(script), run(script, TANDEM_COMMAND="plan")
    assert trains.stdout.startswith("train ") and trains.stdout.endswith(" key=1\n")
    assert plans.stdout == trains.stdout.replace("train ", "plan ", 1)
