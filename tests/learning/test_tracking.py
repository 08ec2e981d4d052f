"""Trackers of whole runs: every command has them, and a run that is killed goes on in the same record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tests import programs
from tests.conftest import ROOT
from tests.programs import TANDEM, Program

KEPT = '''
import json
import tandem

class Kept(tandem.Tracker):
    """Lines: what it was told, tables, steps, and how the run ended."""

    def __init__(self, options, run):
        self.file = (run.directory / "kept.jsonl").open("a")
        self.write(id=run.id, seed=run.config["trainer"]["seed"], python=run.environment["python"])

    def write(self, **line):
        print(json.dumps(line), file=self.file, flush=True)

    def log_samples(self, step, table, samples):
        self.write(table=table, at=step, rows=len(samples), prompt=samples[0].prompt)

    def log(self, step, metrics):
        self.write(step=step, validation=[name for name in metrics if name.startswith("val/")])

    def close(self, ended):
        self.write(ended=ended)
        self.file.close()
'''


def kept(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "kept.jsonl").read_text().splitlines()]


@pytest.fixture
def tracker(tmp_path: Path) -> str:
    (tmp_path / "kept.py").write_text(KEPT)
    return f"tracking.own=['{tmp_path}/kept.py:Kept']"


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_supervised_training_has_trackers(sort4: Path, tmp_path: Path, tracker: str, command: str) -> None:
    answers = [json.loads(line) for line in (sort4 / "sft.jsonl").read_text().splitlines()[:16]]
    paired = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "9"} for row in answers]
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in (answers if command == "sft" else paired)))
    rows = {"train_files": [str(data)], "val_files": [str(data)], "rows_per_step": 8, "max_tokens": 16}
    trainer = {"run_dir": str(run), "steps": 2, "eval_every": 2}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": f"{sort4}/model"}, "data": rows, "trainer": trainer}))
    assert main([command, str(config), tracker]) == 0
    told, *steps, ended = kept(run)
    assert (run / "ended").read_text() == "finished\n"
    assert told["seed"] == 0 and told["python"] and ended == {"ended": "finished"}
    assert [(line["step"], bool(line["validation"])) for line in steps] == [(0, True), (1, False), (2, True)]


def test_ctrl_c_closes_trackers(grpo_config: Path, tmp_path: Path, tracker: str) -> None:
    process = Program(
        [TANDEM, "train", str(grpo_config), tracker, "trainer.steps=500"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = tmp_path / "run"
    while not (run / "kept.jsonl").exists() or not any("step" in line for line in kept(run)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert kept(run)[-1] == {"ended": "stopped"} and (run / "ended").read_text().startswith("stopped\n")
    assert [line["step"] for line in kept(run)[1:-1]] == [*range(1, len(kept(run)) - 1)]


@pytest.mark.nightly
def test_a_killed_run_goes_on_in_the_same_records(grpo_config: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed here")
    tree = yaml.safe_load(grpo_config.read_text())
    tree["trainer"] |= {"steps": 5, "save_every": 2, "eval_every": 2}
    tree["tracking"] = {"wandb": {"mode": "offline"}, "mlflow": {"samples_every": 2}}
    grpo_config.write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(tmp_path)}
    command, run = [TANDEM, "train"], tmp_path / "run"
    process = Program([*command, str(grpo_config)], cwd=ROOT, env=environment)
    states = [run / f"trackers/{name}.json" for name in ("wandb", "mlflow")]
    while not all(path.exists() and json.loads(path.read_text())["step"] >= 3 for path in states):
        assert process.poll() is None, "it ended too soon"
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = [json.loads(path.read_text())["id"] for path in states]
    programs.run([*command, "--resume", str(run)], cwd=ROOT, env=environment, check=True)
    assert [json.loads(path.read_text())["id"] for path in states] == before

    from tandem.tracking.trackers.wandb import offline_history

    expected = read_metrics(run / "metrics.jsonl")
    rows = [row for path in sorted(run.glob("wandb/offline-*/*.wandb")) for row in offline_history(path)]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5] == [record["step"] for record in expected]
    assert [row.get("reward/mean") for row in rows] == [record.get("reward/mean") for record in expected]
    (points,) = run.glob("mlflow/*/*/metrics/reward/mean")
    assert [line.split()[2] for line in points.read_text().splitlines()] == ["1", "2", "3", "4", "5"]
    assert sorted(path.name for path in run.glob("mlflow/*/*/artifacts/samples/*")) == [
        "step_000002.json",
        "step_000004.json",
    ]


def test_help_and_configuration_import_no_tracker(grpo_config: Path) -> None:
    code = (
        "import sys; from tandem.cli import main; from tandem.config.load import load_config\n"
        "from tandem.config.tree import TrainConfig; from pathlib import Path\n"
        "main(['--help']); load_config(TrainConfig, Path(sys.argv[1]), [sys.argv[2]])\n"
        "print([name for name in ('wandb', 'mlflow', 'tensorboard', 'swanlab', 'trackio') if name in sys.modules])\n"
    )
    every = "tracking={wandb: true, mlflow: true, tensorboard: true, own: ['a.py:B']}"
    command = [sys.executable, "-c", code, str(grpo_config), every]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]", printed
