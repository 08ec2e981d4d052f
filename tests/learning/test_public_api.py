"""Runs started from Python, with nothing but `import tandem`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tandem
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT


def test_a_trainer_runs_what_the_command_line_does(grpo_config: Path, tmp_path: Path) -> None:
    assert tandem.Trainer(grpo_config).fit()
    assert [record["step"] for record in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


def test_train_knows_the_kind_of_training_by_its_configuration(sort4: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{number} ", "chosen": "2", "rejected": "3"} for number in range(4)]
    demonstrations = [{"prompt": f"{number} ", "completion": "2"} for number in range(4)]
    for kind, rows, metric in (
        (tandem.SftConfig, demonstrations, "sft/loss"),
        (tandem.DpoConfig, pairs, "dpo/loss"),
        (tandem.RewardModelConfig, pairs, "reward_model/loss"),
    ):
        run_dir, data = tmp_path / kind.__name__, tmp_path / f"{kind.__name__}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {"model": {"path": sort4 / "model"}, "data": {"train_files": [data], "rows_per_step": 4}}
        config = kind.model_validate({**tree, "trainer": {"run_dir": run_dir, "steps": 1}})
        assert tandem.train(config)
        assert metric in read_metrics(run_dir / "metrics.jsonl")[-1]


def test_every_mistake_is_told_before_anything_starts(grpo_config: Path, tmp_path: Path) -> None:
    wrong = ["data.train_files=[nowhere.parquet]", f"reward.functions=[{ROOT}/nowhere.py:score]"]
    config = tandem.load_config(tandem.TrainConfig, grpo_config, wrong)
    with pytest.raises(tandem.UserError, match=r"(?s)nowhere\.parquet.*nowhere\.py"):
        tandem.train(config)
    assert not (tmp_path / "run").exists()
