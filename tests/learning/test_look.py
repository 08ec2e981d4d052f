"""A tiny model learns to look: a tool shows it pictures, and what it does with them is trained over two turns."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.one_tool import CALL_TAGS
from examples.tiles import look
from examples.tiles.task import SIDE, draw_weights, puzzles, write_model, write_rows
from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_groups, trajectories_path
from tests.conftest import ROOT

FAMILY, STEPS = "qwen2_5_vl", 10
REWARD = '''
def looked(completion, prompt, messages):
    """1 where the policy was shown the pair that was asked for, and spoke then."""
    shown = [m for m in messages if m["role"] == "tool" and isinstance(m["content"], list)]
    asked = [c["function"]["arguments"]["pair"] for m in messages for c in m.get("tool_calls", ())]
    return float(len(shown) == 1 and messages[-1]["role"] == "assistant" and asked == [prompt[0]["content"][0]])
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen how one looks, and a run of it."""
    folder = tmp_path_factory.mktemp("look")
    rows = [look.question(*puzzle, random.Random(0)) for puzzle in puzzles(folder, "train", 60, 0, SIDE[FAMILY])]
    write_rows(folder / "sft.jsonl", look.demonstrations(rows, 20, 20, seed=0))
    write_rows(folder / "train.jsonl", rows)
    write_model(folder / "model", FAMILY, lambda model: draw_weights(model, 0), look.TEMPLATE, CALL_TAGS)
    (folder / "reward.py").write_text(REWARD)
    rows_of = [f"model.path={folder}/model", f"data.train_files=[{folder}/sft.jsonl]", "data.rows_per_step=32"]
    length = [f"trainer.run_dir={folder}/sft", "trainer.steps=40", "training.optimizer.warmup_steps=5"]
    assert main(["sft", str(ROOT / "recipes/look_sft.yaml"), *rows_of, *length]) == 0
    assert main(["train", *arguments(folder, "run")]) == 0
    return folder / "run"


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    tool = f"{{type: function, function: '{ROOT}/examples/tiles/tools.py:Tiles', arguments: {{folder: '{folder}'}}}}"
    return [
        str(ROOT / "recipes/look_grpo.yaml"), f"model.path={folder}/sft", f"data.train_files=[{folder}/train.jsonl]",
        "data.val_files=[]", "data.prompts_per_step=8", f"conversation.environment.tools=[{tool}]",
        f"conversation.calls={ROOT}/examples/one_tool.py:read_calls", f"reward.functions=[{folder}/reward.py:looked]",
        f"trainer.run_dir={folder}/{name}", f"trainer.steps={STEPS}", "trainer.eval_every=0",
        "training.optimizer.lr=2e-3", *overrides,
    ]  # fmt: skip


def test_the_model_learns_to_look(run: Path) -> None:
    records = read_metrics(run / "metrics.jsonl")
    means = [record["reward/mean"] for record in records if record["step"] > 0]
    assert 0.02 < means[0] < 0.6, "it looks now and then"
    assert sum(means[-3:]) / 3 > means[0] + 0.2


def test_engine_and_trainer_agree_on_what_was_said_after_a_picture(run: Path) -> None:
    """The engine goes on from the keys and values that it kept of the turn before."""
    mismatch = [record["rollout/mismatch_max"] for record in read_metrics(run / "metrics.jsonl") if record["step"] > 0]
    assert len(mismatch) == STEPS and max(mismatch) < 2e-5
    groups = read_groups(trajectories_path(run, STEPS), STEPS)
    shown = [trajectory for group in groups for trajectory in group.trajectories if trajectory.pictures]
    assert len(shown) > 20 and len({trajectory.pictures[0].key for trajectory in shown}) > 1
    for trajectory in shown:
        place = trajectory.pictures[0].place - len(trajectory.prompt.token_ids)
        assert not trajectory.loss_mask[place : place + 2].any() and trajectory.loss_mask[place + 2 :].any()


def test_what_was_said_and_shown_is_trained_on_again(run: Path) -> None:
    """From the files of a run and its store of pictures, without an engine or a tool."""
    two = ["trainer.steps=2", "trainer.save_every=2"]
    assert main(["train", *arguments(run.parent, "first", *two, f"data.images.directory={run.parent}/store")]) == 0
    saved = str(run.with_name("first") / "trajectories")
    assert main(["train", *arguments(run.parent, "again", *two), "--debug-train", saved]) == 0
    weights = "checkpoints/step_000002/model/model.safetensors"
    first, again = (load_file(run.with_name(name) / weights) for name in ("first", "again"))
    assert all(np.array_equal(first[name], again[name]) for name in first.keys() | again.keys())
