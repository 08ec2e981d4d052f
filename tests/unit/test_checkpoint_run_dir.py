"""One run a directory; resuming compares configurations; files are whole."""

import copy
import os
from pathlib import Path

import pytest
import yaml

from tandem import files
from tandem.checkpoint.run_dir import open_run_dir
from tandem.errors import UserError

CONFIG = {
    "model": {"path": "m", "critic_path": None},
    "data": {"train_files": ["a.parquet"], "prompts_per_step": 8},
    "trainer": {"run_dir": "r", "steps": 10, "epochs": None, "save_every": 5},
    "tracking": {"tensorboard": False},
}


def config(**changes) -> str:
    tree = copy.deepcopy(CONFIG)
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        tree[section][key] = value
    return yaml.safe_dump(tree, sort_keys=False)


def test_a_new_run_writes_its_configuration(tmp_path):
    run = tmp_path / "deep" / "run"
    open_run_dir(run, config(), resume=False)
    assert yaml.safe_load((run / "config.yaml").read_text()) == CONFIG
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def started(run: Path) -> Path:
    """A run that has made its first step."""
    open_run_dir(run, config(), resume=False)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def test_another_run_is_refused_unless_resumed(tmp_path):
    run = started(tmp_path / "run")
    with pytest.raises(UserError, match="holds another run; continue it with --resume"):
        open_run_dir(run, config(), resume=False)
    open_run_dir(run, config(), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_before_its_first_step_is_taken_over(tmp_path, resume):
    open_run_dir(tmp_path, config(), resume=False)
    (tmp_path / "environment.json").touch()
    open_run_dir(tmp_path, config(trainer__seed=1), resume)
    assert (tmp_path / "config.yaml").read_text() == config(trainer__seed=1)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds another run"):
        open_run_dir(tmp_path, config(), resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_is_not_a_run_is_refused(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run \(no config.yaml, but thesis.tex\)"):
        open_run_dir(tmp_path, config(), resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_run_dir(tmp_path / "thesis.tex", config(), resume)


def test_resume_without_a_run_starts_one(tmp_path):
    open_run_dir(tmp_path / "run", config(), resume=True)
    assert (tmp_path / "run" / "config.yaml").exists()


def test_resume_may_change_length_and_records(tmp_path):
    started(tmp_path)
    longer = config(trainer__steps=20, trainer__save_every=2, tracking__tensorboard=True, trainer__run_dir="/moved")
    open_run_dir(tmp_path, longer, resume=True)
    assert (tmp_path / "config.yaml").read_text() == longer


def test_resume_refuses_other_settings_and_lists_them(tmp_path):
    started(tmp_path)
    other = config(data__prompts_per_step=16, model__critic_path="c", trainer__steps=20, trainer__seed=1)
    with pytest.raises(UserError) as raised:
        open_run_dir(tmp_path, other, resume=True)
    message = str(raised.value)
    assert "data.prompts_per_step: 8 -> 16" in message
    assert "model.critic_path: None -> c" in message
    assert "trainer.seed: None -> 1" in message
    assert "trainer.steps" not in message
    assert "another trainer.run_dir" in message
    assert (tmp_path / "config.yaml").read_text() == config()


def test_the_leftover_of_a_killed_write_is_no_obstacle(tmp_path):
    (tmp_path / ".config.yaml.tmp").write_text("model:")
    open_run_dir(tmp_path, config(), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


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
