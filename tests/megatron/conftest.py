"""One process for all the scripts of these tests, and which of their cases are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RunScript = Callable[..., int]


@pytest.fixture(scope="session")
def run_script() -> Iterator[RunScript]:
    """Runs `main` of a script by its name, with arguments that JSON has; returns the exit status."""
    script = Path(__file__).with_name("scripts.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        told, exits = process.stdin, process.stdout

        def run(name: str, *arguments: Any) -> int:
            print(json.dumps([name, *arguments]), file=told, flush=True)
            return int(exits.readline())

        yield run


@pytest.fixture(scope="module")
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether tests of the file are selected that are marked nightly: a script leaves out what only these look at."""
    file = request.node.path
    return any(item.path == file and item.get_closest_marker("nightly") for item in request.session.items)
