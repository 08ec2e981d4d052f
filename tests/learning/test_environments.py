"""Environments of other libraries, the real packages: five steps of training each, on a tiny model."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main as tandem
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

OPENENV = ROOT / ".venv-openenv/bin/python"
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
GUESS = {"type": "gymnasium", "environment": f"{ROOT}/examples/environments/guess.py:Guess"}
CASES: dict[str, dict[str, Any]] = {
    "gymnasium": GUESS,
    "textarena": {"type": "textarena", "environment": "GuessTheNumber-v0"},
    "reasoning_gym": {"type": "reasoning_gym", "dataset": "chain_sum", "arguments": DIGITS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, untrained, and `train.parquet`, as `tandem data episodes` writes it."""
    made = tmp_path_factory.mktemp("environments")
    words = [f"I think of a number. Play the game. [GAME] Answer {number}." for number in range(100)]
    load_file(ROOT / "examples/hh/tiny.py").write_model(made / "model", words, tokens=300, width=64)
    assert tandem(["data", "episodes", "--rows", "50", "--val-rows", "5", "--out", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[str]:
    if not OPENENV.exists():
        pytest.skip("needs OpenEnv: scripts/openenv-env")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "examples/environments/openenv_server.py"
    server = subprocess.Popen([str(OPENENV), str(script), "--port", str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def train(folder: Path, run: Path, environment: dict[str, Any]) -> list[dict[str, float]]:
    config = {
        "model": {"path": str(folder / "model")},
        "data": {"train_files": [str(folder / "train.parquet")], "prompts_per_step": 2, "max_prompt_tokens": 200},
        "algorithm": {"type": "grpo", "group_size": 4},
        "generation": {"max_response_tokens": 256},
        "conversation": {"environment": environment, "max_turns": 3, "max_turn_tokens": 12},
        "training": {"optimizer": {"lr": 1e-3}},
        "trainer": {"run_dir": str(run), "steps": 5},
    }
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    assert tandem(["train", str(path)]) == 0
    return read_metrics(run / "metrics.jsonl")


def check(records: list[dict[str, float]]) -> None:
    assert [record["step"] for record in records if "reward/mean" in record] == [1, 2, 3, 4, 5]
    for record in records:
        assert record["conversation/environment_errors"] == 0 and record["conversation/environment_retries"] == 0
        assert record["reward/not_scored"] == 0


@pytest.mark.parametrize("name", CASES)
def test_each_library_trains(name: str, folder: Path, tmp_path: Path) -> None:
    records = train(folder, tmp_path / "run", {**CASES[name], "processes": 1})
    check(records)
    assert all(1 <= record["conversation/turns"] <= (1 if name == "reasoning_gym" else 3) for record in records)


def test_openenv_trains(folder: Path, openenv_server: str, tmp_path: Path) -> None:
    check(train(folder, tmp_path / "run", {"type": "openenv", "base_url": openenv_server}))
