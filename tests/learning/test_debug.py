"""Half a run at a time equals that half of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories


def test_the_halves_make_the_whole(grpo_config: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    common = ["train", str(grpo_config), f"reward.functions=[{tmp_path}/reward.py:digits]"]
    whole, rollout, replay = tmp_path / "whole", tmp_path / "rollout", tmp_path / "replay"
    assert main([*common, f"trainer.run_dir={whole}"]) == 0
    assert main([*common, f"trainer.run_dir={rollout}", "--debug-rollout"]) == 0
    first = Path("trajectories/step_000001.parquet")
    columns = ["response_ids", "rollout_logprobs", "reward"]
    assert read_trajectories(rollout / first, columns).equals(read_trajectories(whole / first, columns))
    assert not (rollout / "checkpoints").exists()

    assert main([*common, f"trainer.run_dir={replay}", "--debug-train", str(whole / "trajectories")]) == 0
    names = ("actor/pg_loss", "actor/grad_norm", "reward/mean", "rollout/mismatch_max")
    assert [[record[name] for name in names] for record in read_metrics(replay / "metrics.jsonl")] == [
        [record[name] for name in names] for record in read_metrics(whole / "metrics.jsonl")
    ]
    assert "time/generation_s" not in read_metrics(replay / "metrics.jsonl")[0]


@pytest.fixture
def judge(sort4: Path, tmp_path: Path) -> Path:
    """A reward model that gives every answer 2.5."""
    model = AutoModelForTokenClassification.from_pretrained(sort4 / "model", num_labels=1)
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.bias.fill_(2.5)
    model.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(sort4 / "model").save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_evaluation_and_rollouts_alone_ask_the_reward_model(grpo_config: Path, judge: Path, tmp_path: Path) -> None:
    by_model = [str(grpo_config), f"model.reward_model_path={judge}", "reward.functions=[]"]
    out = tmp_path / "metrics.json"
    assert main(["eval", *by_model, "generation.max_response_tokens=4", f"--out={out}"]) == 0
    assert json.loads(out.read_text())["val/sort4/reward/mean@4"] == 2.5
    assert main(["train", *by_model, "trainer.steps=1", "--debug-rollout"]) == 0
    assert read_metrics(tmp_path / "run/metrics.jsonl")[0]["reward/mean"] == 2.5


def test_no_trajectories_is_the_users_mistake(grpo_config: Path, tmp_path: Path) -> None:
    arguments = ["train", str(grpo_config), f"trainer.run_dir={tmp_path / 'run'}", "--debug-train"]
    assert main([*arguments, str(tmp_path / "nowhere")]) == 2
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert main([*arguments, str(tmp_path / "broken.parquet")]) == 2


def test_answers_of_one_model_for_every_step_are_trained_on_as_stale_ones(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path
) -> None:
    """As docs/debugging.md has it: first only the rollout, then only the training on what it has saved."""
    (tmp_path / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    common = ["train", str(grpo_config), f"reward.functions=[{tmp_path}/reward.py:digits]", "trainer.steps=3"]
    assert main([*common, f"trainer.run_dir={tmp_path}/look", "--debug-rollout"]) == 0
    replay = ["--debug-train", f"{tmp_path}/look/trajectories"]
    assert main([*common, f"trainer.run_dir={tmp_path}/learn", *replay]) == 0
    assert "they are trained on as with trainer.max_staleness: 2\n" in capsys.readouterr().out
    staleness = [record["rollout/staleness/max"] for record in read_metrics(tmp_path / "learn/metrics.jsonl")]
    assert staleness == [0, 1, 2]

    assert main([*common, f"trainer.run_dir={tmp_path}/no", *replay, "algorithm.loss.type=reinforce"]) == 2
    assert "trainer.max_staleness: 2 nothing corrects for answers of older weights" in capsys.readouterr().err


def test_a_file_of_any_step_is_trained_on_alone(grpo_config: Path, tmp_path: Path) -> None:
    """Its versions are those of another run, to which this one has not come."""
    whole = [str(grpo_config), "trainer.steps=3", "trainer.max_staleness=1", f"trainer.run_dir={tmp_path}/whole"]
    assert main(["train", *whole]) == 0
    replay = ["trainer.max_staleness=1", f"trainer.run_dir={tmp_path}/replay", "--debug-train"]
    assert main(["train", str(grpo_config), *replay, f"{tmp_path}/whole/trajectories/step_000003.parquet"]) == 0
    (record,) = read_metrics(tmp_path / "replay/metrics.jsonl")
    assert record["rollout/staleness/max"] == 1


def test_files_of_trajectories_hold_no_greedy_answers(
    capsys: pytest.CaptureFixture[str], grpo_config: Path, tmp_path: Path
) -> None:
    """Without these all advantages of ReMax would be 0."""
    remax = ["train", str(grpo_config), "algorithm.type=remax", "trainer.steps=1"]
    assert main([*remax, f"trainer.run_dir={tmp_path / 'whole'}"]) == 0
    replay = ["--debug-train", f"{tmp_path}/whole/trajectories"]
    assert main([*remax, f"trainer.run_dir={tmp_path / 'replay'}", *replay]) == 2
    assert "algorithm.type: remax needs the rewards of greedy answers" in capsys.readouterr().err
