"""Killed while a checkpoint is written and later steps change what it is a copy of: the latest one is always whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [15, pytest.param(50, marks=pytest.mark.nightly)])
def test_kills_while_a_checkpoint_is_written(kills: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_while_written.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(kills), "0"], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(r"(\d+) kills, (\d+) of them while a checkpoint was written: .*\n", done.stdout)
    assert found and int(found[1]) == kills and int(found[2]) > kills / 2, done.stdout
