"""Environments of other libraries, the real packages: five steps of training each, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main as tandem
from tandem.rollout.agents import Access, AgentsWord, CommandAgent
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories, trajectories_path
from tests.agents import ScriptedEngine, a_session, check_record
from tests.conftest import ROOT, load_file
from tests.endpoint import captured

OPENENV, VERIFIERS = ROOT / ".venv-openenv/bin/python", ROOT / ".venv-verifiers/bin/python"
EXAMPLES = ROOT / "examples/environments"
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
GUESS = {"type": "gymnasium", "environment": f"{EXAMPLES}/guess.py:Guess"}
CASES: dict[str, dict[str, Any]] = {
    "gymnasium": GUESS,
    "textarena": {"type": "textarena", "environment": "GuessTheNumber-v0"},
    "reasoning_gym": {"type": "reasoning_gym", "dataset": "chain_sum", "arguments": DIGITS},
}

CHAT_WITH_TOOLS = """\
{% for tool in tools or [] %}<|user|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
ADD_19_AND_31 = '<tool_call>{"name": "calculator_add", "arguments": {"a": 19, "b": 31}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, untrained, and `train.parquet`, as `tandem data episodes` writes it."""
    made = tmp_path_factory.mktemp("environments")
    words = [f"I think of a number. Play the game. [GAME] Answer {number}." for number in range(100)]
    load_file(ROOT / "examples/hh/tiny.py").write_model(made / "model", words, tokens=300, width=64)
    assert tandem(["data", "episodes", "--rows", "50", "--val-rows", "5", "--out", str(made)]) == 0
    return made


@contextmanager
def served(python: Path, script: str, *arguments: str) -> Iterator[str]:
    """The URL of a server of examples/environments that runs in an environment of its own."""
    if not python.exists():
        pytest.skip(f"needs {python.parts[-3]}: scripts/{python.parts[-3].removeprefix('.venv-')}-env")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), str(EXAMPLES / script), *arguments, "--port", str(port)]
    found = {**os.environ, "PYTHONPATH": str(EXAMPLES)}  # for what a server starts by a module's name
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=found) as server:
        until = time.monotonic() + 180
        while time.monotonic() < until and server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[str]:
    with served(OPENENV, "openenv_server.py") as url:
        yield url


@pytest.fixture(scope="module")
def verifiers_server() -> Iterator[str]:
    with served(VERIFIERS, "verifiers_server.py", "addition") as url:
        yield url


def train(folder: Path, run: Path, environment: dict[str, Any], **sections: Any) -> list[dict[str, float]]:
    config = {
        "model": {"path": str(folder / "model")},
        "data": {"train_files": [str(folder / "train.parquet")], "prompts_per_step": 2, "max_prompt_tokens": 200},
        "algorithm": {"type": "grpo", "group_size": 4},
        "generation": {"max_response_tokens": 256},
        "conversation": {"environment": environment, "max_turns": 3, "max_turn_tokens": 12},
        "training": {"optimizer": {"lr": 1e-3}},
        "trainer": {"run_dir": str(run), "steps": 5},
        **sections,
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


def agent_of(verifiers_server: str) -> str:
    return f"{sys.executable} {EXAMPLES}/verifiers_agent.py {verifiers_server}"


def test_verifiers_trains(folder: Path, verifiers_server: str, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_WITH_TOOLS)
    records = train(
        folder,
        tmp_path / "run",
        {},
        model={"path": str(model)},
        data={"train_files": [str(folder / "train.parquet")], "prompts_per_step": 1, "max_prompt_tokens": 200},
        algorithm={"type": "grpo", "group_size": 2},
        generation={"max_response_tokens": 24},
        conversation={"environment": {"type": "endpoint", "command": agent_of(verifiers_server)}, "calls": "hermes"},
    )
    check(records)
    for step in range(1, 6):
        for row in read_trajectories(trajectories_path(tmp_path / "run", step)).to_pylist():
            assert [turn["author"] for turn in row["turns"]] == ["policy"] and all(row["loss_mask"])
            said = json.loads(row["messages"])[-1]["content"]
            assert row["environment_reward"] == pytest.approx(0.1 * any(letter.isdigit() for letter in said))


def test_verifiers_plays_with_its_tools_and_scores_what_was_recorded(verifiers_server: str) -> None:
    engine = ScriptedEngine(lambda prompt: "It is 50." if "<tool_response>50" in prompt else ADD_19_AND_31)
    with captured(lambda: a_session(engine)) as (url, sessions, loop):
        agent, session = CommandAgent(agent_of(verifiers_server)), a_session(engine)

        async def play() -> AgentsWord:
            key = sessions.begin(session)
            return await agent.run({"seed": 3}, "", Access(f"{url}/v1", key))

        word = asyncio.run_coroutine_threadsafe(play(), loop).result()
    assert (word.reward, word.numbers) == (pytest.approx(1.1), {"characters": 9})
    (branch,) = check_record(session, engine, branches=1)
    assert [turn.author for turn in branch.turns] == ["policy", "tool", "policy"]
