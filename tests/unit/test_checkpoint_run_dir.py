"""One run a directory; resuming compares configurations, key by key; files are whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem import files
from tandem.checkpoint.run_dir import check_run_dir, open_run_dir, refuse_to_fetch_into
from tandem.config.load import dump_config
from tandem.config.tree import TrainConfig
from tandem.errors import UserError
from tests.conftest import ROOT


def config(run: Path, resume: bool = False, **changes: Any) -> TrainConfig:
    """A configuration of a run in `run`; `section__key=value` sets a key."""
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["a.parquet"], "prompts_per_step": 8},
        "trainer": {"run_dir": str(run), "steps": 10, "save_every": 5, "resume": resume},
    }
    for dotted, value in changes.items():
        *parents, key = dotted.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[key] = value
    return TrainConfig.model_validate(tree)


def claim(config: TrainConfig) -> list[str]:
    """Make the directory the run's and let go of it; what has changed since the run was started."""
    with open_run_dir(config) as changed:
        return [str(change) for change in changed]


def started(run: Path, **changes: Any) -> Path:
    """A run that has made its first step."""
    claim(config(run, **changes))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def test_a_new_run_writes_its_configuration(tmp_path):
    run = tmp_path / "deep" / "run"
    assert claim(config(run)) == []
    assert TrainConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text())) == config(run)
    assert sorted(path.name for path in run.iterdir()) == [".lock", ".started.yaml", "config.yaml"]


def test_another_run_is_refused_unless_resumed(tmp_path):
    run = started(tmp_path / "run")
    with pytest.raises(UserError, match="holds another run; continue it with --resume"):
        claim(config(run))
    claim(config(run, resume=True))


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_before_its_first_step_is_taken_over(tmp_path, resume):
    claim(config(tmp_path))
    (tmp_path / "environment.json").touch()
    claim(config(tmp_path, resume, trainer__seed=1))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["seed"] == 1
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds another run"):
        claim(config(tmp_path))


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_is_not_a_run_is_refused(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run \(no config.yaml, but thesis.tex\)"):
        claim(config(tmp_path, resume))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    for path in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "run"):
        with pytest.raises(UserError, match=r"thesis.tex:? is a file; give another trainer.run_dir"):
            claim(config(path, resume))


def test_resume_without_a_run_starts_one(tmp_path):
    claim(config(tmp_path / "run", resume=True))
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_directory_that_the_file_system_refuses_is_the_users_mistake():
    with pytest.raises(UserError, match=r"trainer.run_dir: .*/proc/run.*; give another one"):
        claim(config(Path("/proc/run")))


def test_checking_writes_nothing(tmp_path):
    check_run_dir(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_resources_time_outs_records_and_length_may_change(tmp_path):
    started(tmp_path, cluster={"type": "ray", "ranks": 1, "address": "10.0.0.1:6379"})
    after = config(
        tmp_path,
        resume=True,
        cluster={"type": "ray", "ranks": 4, "address": "10.0.0.2:6379", "timeout_s": 7200},
        tracking={"tensorboard": True},
        training={"context_parallel": 2},
        trainer__steps=20,
        trainer__save_every=2,
        trainer__keep_last=5,
        trainer__max_restarts=5,
    )
    assert claim(after) == [
        "training.context_parallel: 1 -> 2",
        "cluster.ranks: 1 -> 4",
        "cluster.address: 10.0.0.1:6379 -> 10.0.0.2:6379",
        "cluster.timeout_s: 1800.0 -> 7200.0",
        "trainer.steps: 10 -> 20",
        "trainer.save_every: 5 -> 2",
        "trainer.keep_last: 2 -> 5",
        "trainer.max_restarts: 3 -> 5",
        "tracking.tensorboard: False -> True",
    ]
    assert (tmp_path / "config.yaml").read_text() == dump_config(after)


def test_another_kind_of_cluster_is_one_change(tmp_path):
    started(tmp_path)
    assert claim(config(tmp_path, True, cluster={"type": "ray"})) == ["cluster.type: local -> ray"]


def test_what_decides_what_is_learned_is_refused_all_at_once(tmp_path):
    started(tmp_path, algorithm={"type": "grpo", "group_size": 4})
    other = config(
        tmp_path,
        resume=True,
        data__prompts_per_step=16,
        model__dtype="bfloat16",
        model__lora={"rank": 4},
        algorithm={"type": "ppo", "group_size": 4},
        training={"optimizer": {"lr": 0.5}},
        trainer__steps=20,
        trainer__seed=1,
    )
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(UserError) as raised:
        claim(other)
    first, *listed = str(raised.value).splitlines()
    assert "give the old values" in first and "another trainer.run_dir, for it has no checkpoint yet" in first
    assert listed == [
        "  - model.dtype: float32 -> bfloat16",
        "  - model.lora: null -> {'rank': 4, 'alpha': 32, 'target_modules': 'all-linear'}",
        "  - training.optimizer.lr: 1e-06 -> 0.5",
        "  - trainer.seed: 0 -> 1",
        "  - data.prompts_per_step: 8 -> 16",
        "  - algorithm.type: grpo -> ppo",
    ]
    assert (tmp_path / "config.yaml").read_text() == before


def test_what_was_edited_in_the_runs_own_configuration_is_a_change_as_any_other(tmp_path):
    """--resume reads config.yaml of the run: it is compared with what the run had, not with itself."""
    stored = started(tmp_path) / "config.yaml"
    described = stored.read_text()
    stored.write_text(described.replace("steps: 10", "steps: 20"))
    tree = yaml.safe_load(stored.read_text())
    tree["trainer"]["resume"] = True
    assert claim(TrainConfig.model_validate(tree)) == ["trainer.steps: 10 -> 20"]
    tree["training"]["optimizer"]["lr"] = 0.3
    stored.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError) as raised:
        claim(TrainConfig.model_validate(tree))
    assert f"put the old values back into {stored}, which has been edited" in str(raised.value)
    assert str(raised.value).endswith("\n  - training.optimizer.lr: 1e-06 -> 0.3")
    (tmp_path / ".started.yaml").unlink()  # of a version that wrote none
    assert claim(TrainConfig.model_validate(tree)) == []


def test_the_leftover_of_a_killed_write_is_no_obstacle(tmp_path):
    (tmp_path / ".config.yaml.tmp").write_text("model:")
    claim(config(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".started.yaml", "config.yaml"]


def test_a_run_is_not_fetched_over_another_one(tmp_path):
    run, fetched = started(tmp_path / "run"), dump_config(config(tmp_path / "elsewhere", trainer__steps=20))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step_000001\n")
    refuse_to_fetch_into(run, TrainConfig, fetched)
    refuse_to_fetch_into(tmp_path / "new", TrainConfig, fetched)
    other = dump_config(config(tmp_path / "elsewhere", trainer__seed=7))
    with pytest.raises(UserError, match=r"holds another run than the one to fetch \(trainer.seed: 7 -> 0\)"):
        refuse_to_fetch_into(run, TrainConfig, other)
    with pytest.raises(UserError, match="not a run"):
        refuse_to_fetch_into(tmp_path, TrainConfig, fetched)


def test_one_process_at_a_time(tmp_path):
    """The lock of a process that was killed is free."""
    started(tmp_path)
    code = f"""
import sys, time
from tests.unit.test_checkpoint_run_dir import config, open_run_dir
from pathlib import Path
with open_run_dir(config(Path({str(tmp_path)!r}), resume=True)):
    print("open", flush=True)
    time.sleep(600)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert other.stdout is not None and other.stdout.readline() == "open\n"
    with pytest.raises(UserError, match=f"process {other.pid} on {socket.gethostname()} is running this run; wait"):
        claim(config(tmp_path, resume=True))
    other.kill()
    other.communicate()
    assert claim(config(tmp_path, resume=True)) == []


def test_write_text_replaces_whole_files(tmp_path):
    target = tmp_path / "latest"
    files.write_text(target, "old")
    files.write_text(target, "naïve")
    assert target.read_bytes() == "naïve".encode()
    with pytest.raises(KeyError), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert target.read_text() == "naïve"
    assert os.listdir(tmp_path) == ["latest"]
