"""Files are found from every directory, and a run stands for the model it has made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics


@pytest.fixture
def here(grpo_config: Path, sort4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration that names all files from there."""
    here = tmp_path / "here"
    shutil.copytree(sort4 / "model", here / "model")
    (here / "reward.py").write_text("def digits(completion):\n    return sum(map(str.isdigit, completion)) / 8\n")
    rows = (sort4 / "val.jsonl").read_text().splitlines(keepends=True)[:8]
    (here / "rows.jsonl").write_text("".join(rows))
    tree = yaml.safe_load(grpo_config.read_text())
    tree["model"]["path"] = "model"
    tree["data"] |= {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"]}
    tree["reward"] = {"functions": ["reward.py:digits"], "workers": 1}
    tree["trainer"] = {"run_dir": "run", "steps": 1}
    (here / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(here)
    return here


def test_a_run_goes_on_from_another_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "config.yaml"]) == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["train", "--resume", "../run", "trainer.steps=2"]) == 0
    assert [record["step"] for record in read_metrics(here / "run/metrics.jsonl")] == [1, 2]
    assert not any((here / "elsewhere").iterdir())


def test_a_run_is_evaluated_and_trained_on_by_its_name(here: Path) -> None:
    assert main(["train", "config.yaml"]) == 0
    accuracies = []
    for number, model in enumerate(("run", "run/checkpoints/latest", "run/checkpoints/step_000001/model")):
        out = here / f"accuracies/{number}.json"
        assert main(["eval", "config.yaml", f"model.path={model}", f"--out={out}"]) == 0
        accuracies.append(json.loads(out.read_text()))
    assert accuracies[0] == accuracies[1] == accuracies[2]
    assert main(["train", "config.yaml", "model.path=run", "trainer.run_dir=next"]) == 0
    resolved = yaml.safe_load((here / "next/config.yaml").read_text())["model"]["path"]
    assert resolved == f"{here}/run/checkpoints/step_000001/model", "not what `run` stands for at another time"


def test_a_run_and_a_configuration_may_have_any_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML takes 17 for a number and # for a comment; = is in overrides."""
    shutil.copy(here / "config.yaml", here / "lr=1e-3.yaml")
    for name in ("17", "null", "a: b #é"):
        assert main(["train", "lr=1e-3.yaml", "--resume", name, "--dry-run"]) == 0
    assert main(["train", "lr=1e-3.yaml", "--resume", "17"]) == 0
    assert main(["train", "--resume", "17", "trainer.steps=2"]) == 0
    assert [record["step"] for record in read_metrics(here / "17/metrics.jsonl")] == [1, 2]
    assert main(["train", "--resume", "17", "trainer.run_dir=18"]) == 2
    assert "--resume 17 says which run it is; leave trainer.run_dir=… out" in capsys.readouterr().err
