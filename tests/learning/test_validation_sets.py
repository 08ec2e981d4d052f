"""Several validation sets: each with its rows, its sampling and its names, in training and in `tandem eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories, validation_path

ROWS = {"val": (0, 2), "many": (2, 3), "short": (3, 5)}
SETS = {"many": {"samples": 3, "temperature": 1.0}, "short": {"max_response_tokens": 1}}
MEANS = {"val/sort4/reward/mean@1", "val/many/sort4/reward/mean@3", "val/short/sort4/reward/mean@1"}


@pytest.fixture
def several(grpo_config: Path, sort4: Path, tmp_path: Path) -> Path:
    """Five validation rows: two of `val_files`, one of `many`, two of `short`."""
    lines = (sort4 / "val.jsonl").read_text().splitlines(keepends=True)
    for name, (first, end) in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[first:end]))
    tree = yaml.safe_load(grpo_config.read_text())
    sets = {name: {"files": [str(tmp_path / f"{name}.jsonl")], **how} for name, how in SETS.items()}
    tree["data"] |= {"val_files": [str(tmp_path / "val.jsonl")], "val_sets": sets}
    tree["generation"]["eval"] = {"samples": 1, "temperature": 0}
    tree["trainer"] |= {"steps": 1, "eval_every": 1, "best_metric": "val/many/sort4/reward/mean@3"}
    config = tmp_path / "several.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def test_each_set_is_answered_as_it_says(several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "short.jsonl").open("a") as file:
        file.write('{"prompt": ""}\n')
    assert main(["train", str(several), "data.on_bad_row=skip"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " skipped" in line]
    assert said == [
        "train.jsonl: 1,024 `prompt` + `data_source` rows; 0 skipped",
        "val.jsonl: 2 `prompt` + `data_source` rows; 0 skipped",
        "many: many.jsonl: 1 `prompt` + `data_source` rows; 0 skipped",
        "short: short.jsonl: 2 `prompt` + `data_source` rows; 1 skipped, the first: row 3: column `prompt` is empty",
    ]
    last = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert {name for name in last if name.startswith("val/") and "/reward/" in name} == MEANS
    rows = read_trajectories(validation_path(tmp_path / "run", 1)).to_pylist()
    assert [row["prompt_index"] for row in rows] == [0, 1, 2, 2, 2, 3, 4]
    assert [len(row["response_ids"]) for row in rows[5:]] == [1, 1]
    assert all(len(row["response_ids"]) > 1 for row in rows[:2])
    assert len({tuple(row["response_ids"]) for row in rows[2:5]}) > 1, "drawn, not greedy"
    assert (tmp_path / "run/checkpoints/best").is_file()

    out, answers = tmp_path / "out.json", str(tmp_path / "answers.parquet")
    skipping = [f"model.path={tmp_path}/run", "data.on_bad_row=skip", "--out", str(out)]
    assert main(["eval", str(several), *skipping, "--answers", answers]) == 0
    assert said[3] in capsys.readouterr().err
    evaluated = json.loads(out.read_text())
    greedy = MEANS - {"val/many/sort4/reward/mean@3"}
    assert {name: evaluated[name] for name in greedy} == {name: last[name] for name in greedy}
    assert {name: one["answers"] for name, one in evaluated["data"].items()} == {
        "sort4": 2, "many/sort4": 3, "short/sort4": 2,
    }  # fmt: skip
    assert main(["eval", str(several), *skipping, "--against", answers]) == 0
    assert json.loads(out.read_text())["against"]["data"].keys() == evaluated["data"].keys()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.val_sets.short.max_response_tokens=99999"], "short.max_response_tokens: 99,999; raise it"),
        (["generation.eval.max_response_tokens=99999"], "eval.max_response_tokens: 99,999 is more"),
        (["trainer.best_metric=val/many/sort4/reward/mean@1"], "did you mean 'val/many/sort4/reward/mean@3'"),
        (["data.val_sets.many.files=[nowhere.jsonl]"], "data.val_sets.many.files: "),
        (["data.val_sets.many.files=[]"], "data.val_sets.many.files: list should have at least 1 item"),
        (["data.val_sets.many.temperature=0.001"], "data.val_sets.many.temperature: give 0, which is greedy"),
        (["data.val_sets={'a b': {files: [x.jsonl]}}"], "data.val_sets.a b: "),
    ],
)
def test_mistakes_in_sets_are_told(
    several: Path, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(several), *overrides, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_two_sets_may_not_have_the_same_metrics(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0])
    (tmp_path / "val.jsonl").write_text(json.dumps(row | {"data_source": "many/sort4"}) + "\n")
    assert main(["train", str(several), "--dry-run"]) == 2
    assert "data.val_sets.many: metrics of its rows and of others would both be called val/many/sort4/…" in (
        capsys.readouterr().err
    )


def test_sets_are_enough(several: Path) -> None:
    assert load_config(TrainConfig, several, ["data.val_files=[]"]).data.val_paths
    assert main(["train", str(several), "data.val_files=[]", "--dry-run"]) == 0
    with pytest.raises(UserError, match="1 error"):
        load_config(TrainConfig, several, ["data.val_sets.many.weight=1"])
