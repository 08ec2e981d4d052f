"""Agents that know nothing but a base URL train: a function with the real client, and a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories, trajectories_path
from tests.conftest import ROOT, load_file

FUNCTION = '''
from openai import AsyncOpenAI

async def solve(row, base_url, api_key):
    """Ask twice, the second time with the first answer before it; the reward is its length."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(row["prompt"])
        for _ in range(2):
            made = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            said = made.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
        return {"reward": len(said) / 8, "asked": 2}
'''
COMMAND = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
body = {"model": "policy", "messages": row["prompt"], "max_tokens": 8}
asked = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(asked) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"] or ""
print("a line before")
print(len(said) / 8)
"""
ROW = {"data_source": "agents", "prompt": [{"role": "user", "content": "2+3?"}]}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    calculator = load_file(ROOT / "examples/calculator/task.py")
    calculator.write_model(folder / "model", 0, calculator.CHAT_TEMPLATE, calculator.CALL_TAGS)
    (folder / "agent.py").write_text(FUNCTION)
    (folder / "command.py").write_text(COMMAND)
    (folder / "rows.jsonl").write_text("\n".join([json.dumps(ROW)] * 8))
    return folder


def train(task: Path, run_dir: Path, environment: str) -> list[dict[str, float]]:
    config = f"""
model: {{path: {task}/model}}
data: {{train_files: [{task}/rows.jsonl], prompts_per_step: 2, max_prompt_tokens: 32}}
algorithm: {{type: grpo, group_size: 2}}
conversation: {{environment: {{type: endpoint, {environment}}}}}
generation: {{max_response_tokens: 64}}
trainer: {{run_dir: {run_dir}, steps: 2}}
"""
    (run_dir.parent / "config.yaml").write_text(config)
    assert main(["train", str(run_dir.parent / "config.yaml")]) == 0
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if record["step"] > 0]


def test_a_function_with_the_real_client_trains_on_all_its_turns(task: Path, tmp_path: Path) -> None:
    records = train(task, tmp_path / "run", f"function: {task}/agent.py:solve")
    assert [record["conversation/calls"] for record in records] == [2, 2]
    assert all(record["conversation/asked"] == 2 and record["rollout/mismatch_max"] < 2e-5 for record in records)
    assert all(record["conversation/environment_errors"] == 0 for record in records)
    rows = read_trajectories(trajectories_path(tmp_path / "run", 2)).to_pylist()
    assert [turn["author"] for turn in rows[0]["turns"]] == ["policy", "user", "policy"]
    assert rows[0]["environment_reward"] is not None and any(rows[0]["loss_mask"])


def test_a_command_trains(task: Path, tmp_path: Path) -> None:
    records = train(task, tmp_path / "run", f'command: "{sys.executable} {task}/command.py"')
    assert [record["conversation/calls"] for record in records] == [1, 1]
    assert all(record["reward/not_scored"] == 0 and record["reward/mean"] > 0 for record in records)


def test_an_agent_that_always_fails_stops_the_run_with_its_reason(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def solve(row, base_url, api_key):\n    raise ValueError('no such tool')\n")
    with pytest.raises(AssertionError):
        train(task, tmp_path / "run", f"function: {tmp_path}/broken.py:solve")
    assert "no such tool" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "section", "status"),
    [("tool_agent", True, 0), ("single_turn_agent", False, 0), ("tool_agent", False, 2), ("my_agent", True, 2)],
)
def test_rows_say_by_which_kind_of_agent_they_are_answered(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, section: bool, status: int
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "data_source": "gsm8k", "answer": "5", "agent_name": name}))
    conversation = f"conversation: {{environment: {{type: endpoint, function: {task}/agent.py:solve}}}}"
    (tmp_path / "config.yaml").write_text(f"""
model: {{path: {task}/model}}
data: {{train_files: [{tmp_path}/rows.jsonl], prompts_per_step: 2, max_prompt_tokens: 32}}
algorithm: {{type: grpo, group_size: 2}}
generation: {{max_response_tokens: 64}}
trainer: {{run_dir: {tmp_path}/run, steps: 2}}
{conversation if section else ""}
""")
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == status
    assert status == 0 or f"agent_name '{name}', and this run answers as" in capsys.readouterr().err
