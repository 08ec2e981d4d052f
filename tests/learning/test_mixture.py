"""A mixture of three sets 5:3:2, killed and resumed: the same rows in the same order, each as often as it should be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tests.learning.conftest import kill_and_resume

ROWS = {"long": 13, "middle": 5, "short": 2}
STEPS, PROMPTS_PER_STEP = 6, 5


def test_kills_change_nothing_and_each_row_is_used_as_often_as_it_should_be(
    grpo_config: Path, sort4: Path, tmp_path: Path
) -> None:
    lines = iter((sort4 / "train.jsonl").read_text().splitlines(keepends=True))
    sets = {}
    for (name, rows), weight in zip(ROWS.items(), (5, 3, 2), strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(next(lines) for _ in range(rows)))
        sets[name] = {"files": [str(tmp_path / f"{name}.jsonl")], "weight": weight}
    tree = yaml.safe_load(grpo_config.read_text())
    tree["data"] |= {"train_files": [], "mixture": sets, "prompts_per_step": PROMPTS_PER_STEP}
    tree["trainer"] |= {"steps": STEPS, "eval_every": 0, "save_every": 2, "trajectories_every": 1}
    kill_and_resume(tree, tmp_path, STEPS)
    used: Counter[int] = Counter()
    for step in range(1, STEPS + 1):
        table = read_trajectories(tmp_path / f"whole/trajectories/step_{step:06d}.parquet")
        used.update({row["group"]: row["prompt_index"] for row in table.to_pylist()}.values())
    last = read_metrics(tmp_path / "whole/metrics.jsonl")[-1]
    check_uses(used, last)
    assert all(f"mixture/{name}/reward" in last for name in ROWS)


@pytest.mark.parametrize(
    ("command", "preference", "cached"),
    [
        ("sft", None, True),
        pytest.param("dpo", {"loss": "orpo"}, False, marks=pytest.mark.nightly),
        pytest.param("dpo", {"loss": "kto"}, True, marks=pytest.mark.nightly),
        pytest.param("reward-model", None, False, marks=pytest.mark.nightly),
    ],
)
def test_fine_tuning_preferences_and_reward_models_draw_alike(
    sort4: Path, tmp_path: Path, command: str, preference: dict[str, str] | None, cached: bool
) -> None:
    lines = [json.loads(line) for line in (sort4 / "train.jsonl").read_text().splitlines()[: sum(ROWS.values())]]
    rows, sets = iter([row_of(command, preference, line) for line in lines]), {}
    for (name, count), weight in zip(ROWS.items(), (5, 3, 2), strict=True):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)))
        sets[name] = {"files": [str(file)], "weight": weight}
    cache = {"directory": str(tmp_path / "cache"), "files_from_mib": 0 if cached else None, "workers": 1}
    tree = {
        "model": {"path": str(sort4 / "model")},
        "data": {"mixture": sets, "rows_per_step": PROMPTS_PER_STEP, "cache": cache},
        "trainer": {"steps": STEPS, "save_every": 2, "run_dir": "overridden"},
        **({"preference": preference} if preference else {}),
    }
    kill_and_resume(tree, tmp_path, STEPS, command=command)
    drawn = (tmp_path / "rows.txt").read_text().splitlines()
    assert len(drawn) == STEPS
    used = Counter(int(row) for step in drawn for row in step.split())
    check_uses(used, read_metrics(tmp_path / "whole/metrics.jsonl")[-1])
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == (len(ROWS) if cached else 0)


def row_of(command: str, preference: dict[str, str] | None, line: dict[str, str]) -> dict[str, object]:
    prompt, right = line["prompt"], line["ground_truth"]
    if command == "sft":
        return {"prompt": prompt, "completion": right}
    if preference == {"loss": "kto"}:
        return {"prompt": prompt, "completion": right, "label": int(right[0]) % 2 == 0}
    return {"prompt": prompt, "chosen": right, "rejected": right[::-1] + "0"}


def check_uses(used: Counter[int], last: dict[str, float]) -> None:
    """Of 30 draws 15, 9 and 6 are of the sets, each row of a set as often as any other, or once more."""
    first = 0
    for (name, rows), draws in zip(ROWS.items(), (15, 9, 6), strict=True):
        counts = [used[row] for row in range(first, first + rows)]
        assert sum(counts) == draws and max(counts) - min(counts) <= 1, name
        first += rows
    assert [last[f"mixture/{name}/epoch"] for name in ROWS] == [15 / 13, 9 / 5, 6 / 2]


def test_a_set_of_bad_rows_alone_stops_a_run_before_it_starts(
    sort4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1=", "completion": ""}\n')
    sets = {"good": {"files": [str(sort4 / "sft.jsonl")]}, "bad": {"files": [str(tmp_path / "bad.jsonl")]}}
    tree = {
        "model": {"path": str(sort4 / "model")},
        "data": {"mixture": sets, "on_bad_row": "skip"},
        "trainer": {"steps": 1, "run_dir": str(tmp_path / "run")},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert main(["sft", str(tmp_path / "sft.yaml")]) == 2
    assert "data.mixture: no usable row is left in bad; mend their rows, or remove them" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
