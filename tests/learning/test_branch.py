"""A new run from another run's checkpoint, and a longer run from its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tandem.training.optimizer import learning_rate
from tandem.training.optimizers.adamw import AdamWConfig

VAL = "val/sort4/reward/mean@1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("branch")


@pytest.fixture(scope="module")
def recipe(directory: Path, sort4: Path) -> Path:
    """GRPO for digits, validated greedily on five rows."""
    (directory / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    (directory / "val.jsonl").write_text("".join((sort4 / "val.jsonl").read_text().splitlines(keepends=True)[:5]))
    tree: dict[str, Any] = {
        "model": {"path": str(sort4 / "model")},
        "data": {
            "max_prompt_tokens": 16,
            "train_files": [str(sort4 / "train.jsonl")],
            "val_files": [str(directory / "val.jsonl")],
            "prompts_per_step": 4,
        },
        "algorithm": {"type": "grpo", "group_size": 4},
        "generation": {"max_response_tokens": 8},
        "training": {"optimizer": {"lr": 1e-2}},
        "reward": {"functions": [f"{directory}/reward.py:digits"], "workers": 1},
        "trainer": {"steps": 4, "eval_every": 4},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    return directory / "config.yaml"


def train(recipe: Path, name: str, *overrides: str) -> Path:
    run = recipe.with_name(name)
    assert main(["train", str(recipe), f"trainer.run_dir={run}", *overrides]) == 0
    return run


@pytest.fixture(scope="module")
def parent(recipe: Path) -> Path:
    return train(recipe, "parent")


def weights(run: Path, step: int) -> dict[str, Any]:
    return load_file(run / f"checkpoints/step_{step:06d}/model/model.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all((one[name] == other[name]).all() for name in one.keys() | other.keys())


def validation(run: Path, step: int) -> Any:
    return read_trajectories(run / f"validation/step_{step:06d}.parquet", ["response_ids", "reward"])


def test_a_branch_has_the_weights_and_the_optimizer_and_settings_of_its_own(recipe: Path, parent: Path) -> None:
    settings = ["trainer.steps=2", "trainer.seed=7", "training.optimizer.lr=1e-3", "training.optimizer.warmup_steps=2"]
    branch = train(recipe, "branch", f"trainer.branch_from={parent}", *settings)
    assert validation(branch, 0).equals(validation(parent, 4))
    records = read_metrics(branch / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [record["actor/lr"] for record in records[1:]] == pytest.approx([5e-4, 1e-3])  # the warm-up is its own
    assert records[1]["data/epoch"] == read_metrics(parent / "metrics.jsonl")[1]["data/epoch"]
    new_optimizer = train(recipe, "new_optimizer", f"model.path={parent}", *settings)
    assert validation(new_optimizer, 0).equals(validation(parent, 4))
    assert read_metrics(new_optimizer / "metrics.jsonl")[1]["reward/mean"] == records[1]["reward/mean"]
    assert not same(weights(branch, 2), weights(new_optimizer, 2)), "the moments were taken over"
    stored = yaml.safe_load((branch / "config.yaml").read_text())
    assert stored["trainer"]["branch_from"] == str(parent / "checkpoints/step_000004")


def test_a_branch_resumes_bit_for_bit_without_its_parent(recipe: Path, parent: Path) -> None:
    moved = shutil.copytree(parent, parent.with_name("moved"))
    settings = [f"trainer.branch_from={moved}/checkpoints/step_000004", "trainer.seed=7"]
    whole = train(recipe, "whole", *settings)
    assert main(["train", str(recipe), f"trainer.run_dir={recipe.with_name('cut')}", *settings, "trainer.steps=2"]) == 0
    shutil.rmtree(moved)
    cut = train(recipe, "cut", *settings, "trainer.resume=true")
    assert same(weights(cut, 4), weights(whole, 4))
    assert [record["reward/mean"] for record in read_metrics(cut / "metrics.jsonl")[1:]] == [
        record["reward/mean"] for record in read_metrics(whole / "metrics.jsonl")[1:]
    ]


def test_another_algorithm_takes_what_there_is(recipe: Path, parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ppo = train(recipe, "ppo", f"trainer.branch_from={parent}", "algorithm={type: ppo, group_size: 4}")
    assert "(the model: weights and optimizer; the critic: as model.critic_path says)" in capsys.readouterr().out
    assert validation(ppo, 0).equals(validation(parent, 4))
    train(recipe, "both", f"trainer.branch_from={ppo}", "algorithm={type: ppo, group_size: 4}", "trainer.steps=1")
    assert "(the model: weights and optimizer; the critic: weights and optimizer)" in capsys.readouterr().out


def test_adapters_start_on_the_weights_alone(recipe: Path, parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    lora = train(recipe, "lora", f"trainer.branch_from={parent}", "model.lora.rank=4")
    assert "(the model: weights, with a new optimizer)" in capsys.readouterr().out
    assert validation(lora, 0).equals(validation(parent, 4))


def test_a_reward_model_starts_on_the_weights_of_a_policy_and_no_policy_as_one(
    recipe: Path, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = recipe.with_name("pairs.jsonl")
    pairs.write_text('{"prompt": "1=", "chosen": "1", "rejected": "2"}\n' * 4)
    tree = {"model": {"path": str(parent)}, "data": {"train_files": [str(pairs)]}, "trainer": {"steps": 1}}
    judges = recipe.with_name("judges.yaml")
    judges.write_text(yaml.safe_dump(tree))
    run = recipe.with_name("judge")
    command = ["reward-model", str(judges), f"trainer.run_dir={run}", f"trainer.branch_from={parent}"]
    assert main([*command, "data.rows_per_step=4"]) == 0
    assert "(the model: weights, with a new optimizer)" in capsys.readouterr().out
    assert (
        main(["train", str(recipe), f"trainer.run_dir={recipe.with_name('none')}", f"trainer.branch_from={run}"]) == 2
    )
    assert "holds a reward model; give the checkpoint of a policy" in capsys.readouterr().err


def test_what_is_no_checkpoint_or_a_damaged_one_is_refused(
    recipe: Path, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(recipe), f"trainer.run_dir={recipe.with_name('none')}"]
    assert main([*command, f"trainer.branch_from={recipe.parent}"]) == 2
    assert "trainer.branch_from: " in (told := capsys.readouterr().err) and "give a run directory" in told
    damaged = shutil.copytree(parent, parent.with_name("damaged"))
    (damaged / "checkpoints/step_000004/model/config.json").write_text("{}")
    assert main([*command, f"trainer.branch_from={damaged}"]) == 2
    assert "not what was written: model/config.json" in (told := capsys.readouterr().err) and "branch_from" in told


def test_resume_names_the_way_to_other_settings(recipe: Path, parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--resume", str(parent), "training.optimizer.lr=1e-3", "trainer.seed=3"]) == 2
    told = capsys.readouterr().err
    assert f"trainer.branch_from={parent} and another trainer.run_dir" in told
    assert "- training.optimizer.lr: 0.01 -> 0.001\n" in told and "- trainer.seed: 0 -> 3\n" in told


def test_a_longer_run_says_what_becomes_of_its_schedule(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cosine = ["training.optimizer.schedule=cosine", "algorithm.minibatches=2"]
    run = train(recipe, "cosine", *cosine, "trainer.steps=3")
    capsys.readouterr()
    train(recipe, "cosine", *cosine, "trainer.steps=6", "trainer.resume=true")
    rates = [learning_rate(AdamWConfig(lr=1e-2, schedule="cosine"), 6, total) for total in (6, 12)]
    told = capsys.readouterr().out
    assert "changed since the last start: trainer.steps: 3 -> 6" in told
    assert (
        f"training.optimizer.schedule: cosine ends at step 6, not 3: the next learning rate is {rates[1]:.3g}, "
        f"not {rates[0]:.3g}" in told
    )
    later = [learning_rate(AdamWConfig(lr=1e-2, schedule="cosine"), step, 12) for step in (6, 7)]
    [record] = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] == 4]
    assert record["actor/lr"] == pytest.approx(sum(later) / 2)


def test_a_best_value_counts_for_its_own_metric_only(recipe: Path) -> None:
    run = train(recipe, "best", "trainer.steps=2", "trainer.best_metric=response_length/mean")
    best = run / "checkpoints/best"
    train(recipe, "best", "trainer.steps=3", "trainer.best_metric=reward/mean", "trainer.resume=true")
    assert best.read_text().strip() == "step_000003", "a length is larger than every reward"


def test_adapters_on_weights_of_another_run_generate_with_all_of_them(recipe: Path, parent: Path) -> None:
    """Engines of their own load what the actor starts from: only what adapters change is published."""
    settings = ["cluster.ranks=2", "model.lora={rank: 4}", "trainer.steps=1", "trainer.eval_every=0"]
    branch = train(recipe, "adapters on two ranks", f"trainer.branch_from={parent}", *settings)
    record = read_metrics(branch / "metrics.jsonl")[-1]
    assert record["rollout/mismatch_max"] < 1e-4


@pytest.mark.parametrize("changed", [True, False])
def test_a_resumed_run_says_that_its_rows_are_others(
    changed: bool, recipe: Path, sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (sort4 / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[:8]))
    short = [f"data.train_files=[{tmp_path}/rows.jsonl]", "trainer.eval_every=0"]
    train(recipe, f"rows {changed}", *short, "trainer.steps=1")
    if changed:  # as many bytes, and the same time
        times = (tmp_path / "rows.jsonl").stat()
        (tmp_path / "rows.jsonl").write_text("".join(rows[8:16]))
        os.utime(tmp_path / "rows.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    train(recipe, f"rows {changed}", *short, "trainer.steps=2", "trainer.resume=true")
    told = "changed since the checkpoint: the content of the training files"
    assert (told in capsys.readouterr().out) == changed
