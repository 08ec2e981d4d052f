"""docs/metrics.md against what runs of every kind write: each metric has a row, and each row is written by some run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file

ROWS = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
RUNS = {
    "grpo": ["train", "trainer.eval_every=1", "trainer.save_every=1"],
    "grpo, answers that lose their reward": [
        "train",
        "reward.functions=[rewards.py:odd_alone]",
        "reward.max_error_share=1",
    ],
    "grpo, answers without acc": ["train", "trainer.eval_every=1", "reward.functions=[rewards.py:right_alone]"],
    "ppo with a critic": ["train", "algorithm={type: ppo}", "reward.functions=[rewards.py:length]"],
    "resampling": ["train", "algorithm={type: dapo, resample_rounds: 1}"],
    "adaptive KL": ["train", "algorithm={type: grpo, kl: {place: reward, control: adaptive}}"],
    "KL in the loss, several steps": ["train", "algorithm={type: grpo, minibatches: 2, kl: {place: loss}}"],
    "rollout correction": ["train", "algorithm={type: grpo, rollout_correction: {type: mask, lower: 0.5}}"],
    "staleness": ["train", "trainer.max_staleness=1", "reward.functions=[rewards.py:length]"],
    "greedy baseline": ["train", "algorithm={type: remax}"],
    "several rewards": ["train", "algorithm={type: gdpo, rewards: {acc: 1}}"],
    "distillation": ["train", "algorithm={type: on_policy_distillation}", "model.teacher_path=teacher"],
    "token baseline": ["train", "algorithm={type: otb}"],
    "a conversation": [
        "train",
        "model.path=calculator",
        "conversation={max_turns: 2, environment: {type: own, environment: 'world.py:World'}}",
        "reward.functions=[]",
    ],
    "mixture": [
        "train",
        "data.train_files=[]",
        "data.mixture={few: {files: [few.jsonl]}, '1-2': {files: [few.jsonl], weight: 3}}",
    ],
    "solve rates": ["train", "data.sampler.type=solve_rate"],
    "supervised, mixture": ["sft", "data.train_files=[]", "data.mixture={few: {files: [sft.jsonl]}}"],
    "LoRA": ["train", "model.lora={rank: 2}"],
    "supervised": ["sft", "data.val_files=[sft.jsonl]", "trainer.eval_every=1"],
    "preferences": ["dpo", "data.val_files=[pairs.jsonl]", "trainer.eval_every=1"],
    "reward model": ["reward-model", "data.val_files=[pairs.jsonl]", "trainer.eval_every=1"],
}
NOT_HERE = {
    "actor/expert_load/max": "a mixture of experts on Megatron",
    "actor/expert_load/min": "a mixture of experts on Megatron",
    "critic/expert_load/max": "a mixture of experts on Megatron",
    "critic/expert_load/min": "a mixture of experts on Megatron",
    "perf/peak_memory_gib/<phase>": "a GPU",
}
"""Rows that these runs cannot write, and what would."""
WORLD = """
import random

from tandem import Reply

class World:
    tools = ()
    numbers = {"asked": 1.0}

    async def start(self, prompt):
        return [{"role": "user", "content": prompt.row["prompt"]}]

    async def step(self, answer):
        return Reply([{"role": "user", "content": "1+1="}])

    async def close(self):
        return random.random()
"""


@pytest.fixture(scope="module")
def written(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The metrics of each run."""
    folder = tmp_path_factory.mktemp("metrics")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare(sort4, folder)
        return {name: metrics_of(name, *run) for name, run in RUNS.items()}


def prepare(sort4: Path, folder: Path) -> None:
    """The files that the runs name."""
    answers = [json.loads(line) for line in (sort4 / "sft.jsonl").read_text().splitlines()[:64]]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "9"} for row in answers]
    for name, rows in (("sft", answers), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = (sort4 / "train.jsonl").read_text().splitlines(keepends=True)
    for name, rows in (("few", 8), ("train", 64)):
        (folder / f"{name}.jsonl").write_text("".join(lines[:rows]))
    (folder / "rewards.py").write_text(
        "def odd_alone(completion, ground_truth):\n    return 1 / (len(completion) % 2)\n\n"
        "def length(completion, ground_truth):\n    return len(completion)\n\n"
        "def right_alone(completion, ground_truth):\n"
        "    return {'score': 1.0, 'acc': 1.0} if len(completion) % 2 else {'score': 0.0}\n"
    )
    (folder / "world.py").write_text(WORLD)
    shutil.copytree(sort4 / "model", folder / "teacher")
    calculator = load_file(ROOT / "examples/calculator/task.py")
    calculator.write_model(folder / "calculator", 0, calculator.CHAT_TEMPLATE, calculator.CALL_TAGS)
    model = f"model: {{path: {sort4}/model}}\n"
    (folder / "train.yaml").write_text(
        f"{model}data:\n"
        f"  {{train_files: [train.jsonl], val_files: [{sort4}/val.jsonl], prompts_per_step: 4, "
        "max_prompt_tokens: 16}\n"
        "generation: {max_response_tokens: 8, eval: {samples: 2, temperature: 1}}\n"
        f"reward: {{functions: ['{ROOT}/examples/sort4/reward.py:compute_score']}}\n"
    )
    for name, rows in (("sft", "sft"), ("dpo", "pairs"), ("reward-model", "pairs")):
        (folder / f"{name}.yaml").write_text(
            f"{model}data: {{train_files: [{rows}.jsonl], rows_per_step: 8, max_tokens: 16}}\n"
        )


def metrics_of(name: str, command: str, *overrides: str) -> set[str]:
    run = Path(re.sub(r"\W+", "-", name))
    assert main([command, f"{command}.yaml", f"trainer={{run_dir: {run}, steps: 2}}", *overrides]) == 0, name
    return {metric for record in read_metrics(run / "metrics.jsonl") for metric in record} - {"step"}


def matching(metric: str) -> list[str]:
    """The row of this name, or the rows that a metric belongs to; `<x>` in a row stands for anything."""
    if metric in ROWS:
        return [metric]
    return [row for row in ROWS if re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(row)), metric)]


def test_every_metric_of_a_run_has_a_row(written: dict[str, set[str]]) -> None:
    assert {run: missing for run, names in written.items() if (missing := {n for n in names if not matching(n)})} == {}


def test_every_row_is_written_by_a_run(written: dict[str, set[str]]) -> None:
    found = {row for names in written.values() for name in names for row in matching(name)}
    assert set(ROWS) - found - set(NOT_HERE) == set()
    assert found.isdisjoint(NOT_HERE)
