"""A tiny model learns, from a reward at the end of its conversations, to ask a tool in their first turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.calculator import task
from examples.letters import write_model, write_rows
from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT

REWARD = '''
def answered(completion, ground_truth, messages):
    """1 where the policy speaks last, and right after a result."""
    told = [message["content"] for message in messages if message["role"] == "tool"]
    return float(bool(told) and messages[-1]["role"] == "assistant" and not told[-1].startswith("error"))
'''


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sft/`, a model that has seen how calls are written, and in `task/` what it was warmed on."""
    folder = tmp_path_factory.mktemp("calculator")
    write_model(folder / "task/model", 0, task.CHAT_TEMPLATE, task.CALL_TAGS)
    write_rows(folder / "task/sft.jsonl", task.demonstrations(60 * 32, seed=0))
    write_rows(folder / "task/train.jsonl", task.questions(80, random.Random(0)))
    (folder / "reward.py").write_text(REWARD)
    rows = [f"model.path={folder}/task/model", f"data.train_files=[{folder}/task/sft.jsonl]", "data.rows_per_step=32"]
    length = [f"trainer.run_dir={folder}/sft", "trainer.steps=60"]
    assert main(["sft", str(ROOT / "recipes/calculator_sft.yaml"), *rows, *length]) == 0
    return folder


def rewards(warmed: Path, run_dir: Path, *overrides: str) -> list[float]:
    """The mean reward of each of ten steps of the recipe."""
    arguments = [
        f"model.path={warmed}/sft", f"data.train_files=[{warmed}/task/train.jsonl]", "data.val_files=[]",
        f"conversation.environment.tools=[{ROOT}/examples/calculator/tools.py:calculate]",
        f"conversation.calls={ROOT}/examples/one_tool.py:read_calls",
        f"reward.functions=[{warmed}/reward.py:answered]", f"trainer.run_dir={run_dir}", "trainer.steps=10",
        "trainer.eval_every=0", "training.optimizer.warmup_steps=0", "training.optimizer.schedule=constant",
        "data.prompts_per_step=8", *overrides,
    ]  # fmt: skip
    assert main(["train", str(ROOT / "recipes/calculator_grpo.yaml"), *arguments]) == 0
    return [record["reward/mean"] for record in read_metrics(run_dir / "metrics.jsonl") if record["step"] > 0]


def test_the_model_learns_to_ask(warmed: Path, tmp_path: Path) -> None:
    means = rewards(warmed, tmp_path / "run")
    assert 0.1 < means[0] < 0.5, "it asks, and is answered, now and then"
    assert sum(means[-3:]) / 3 > means[0] + 0.2


def test_in_one_turn_there_is_nothing_to_learn(warmed: Path, tmp_path: Path) -> None:
    assert rewards(warmed, tmp_path / "run", "conversation.max_turns=1", "trainer.steps=2") == [0, 0]
