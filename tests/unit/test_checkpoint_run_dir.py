"""One run a directory; resuming compares configurations; files are whole."""

import copy
import os

import pytest
import yaml

from tandem import files
from tandem.checkpoint import open_run_dir
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
    assert open_run_dir(run, config(), resume=False) == []
    assert yaml.safe_load((run / "config.yaml").read_text()) == CONFIG
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_another_run_is_refused_unless_resumed(tmp_path):
    open_run_dir(tmp_path / "run", config(), resume=False)
    with pytest.raises(UserError, match="holds another run; continue it with --resume"):
        open_run_dir(tmp_path / "run", config(), resume=False)
    assert open_run_dir(tmp_path / "run", config(), resume=True) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_is_not_a_run_is_refused(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not empty and not a run \(no config.yaml, but thesis.tex\)"):
        open_run_dir(tmp_path, config(), resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_run_dir(tmp_path / "thesis.tex", config(), resume)


def test_resume_without_a_run_starts_one(tmp_path):
    assert open_run_dir(tmp_path / "run", config(), resume=True) == []
    assert (tmp_path / "run" / "config.yaml").exists()


def test_resume_may_change_length_and_records(tmp_path):
    open_run_dir(tmp_path, config(), resume=False)
    longer = config(trainer__steps=20, trainer__save_every=2, tracking__tensorboard=True, trainer__run_dir="/moved")
    assert open_run_dir(tmp_path, longer, resume=True) == [
        "trainer.run_dir: r -> /moved",
        "trainer.steps: 10 -> 20",
        "trainer.save_every: 5 -> 2",
        "tracking.tensorboard: False -> True",
    ]
    assert (tmp_path / "config.yaml").read_text() == longer


def test_resume_refuses_other_settings_and_lists_them(tmp_path):
    open_run_dir(tmp_path, config(), resume=False)
    other = config(data__prompts_per_step=16, model__critic_path="c", trainer__steps=20, trainer__seed=1)
    with pytest.raises(UserError) as raised:
        open_run_dir(tmp_path, other, resume=True)
    message = str(raised.value)
    assert "data.prompts_per_step: 8 -> 16" in message
    assert "model.critic_path: None -> c" in message
    assert "trainer.seed: (absent) -> 1" in message
    assert "trainer.steps" not in message
    assert "another trainer.run_dir" in message
    assert (tmp_path / "config.yaml").read_text() == config()


def test_leftovers_of_killed_writes_are_no_obstacle(tmp_path):
    (tmp_path / ".config.yaml.tmp-123").write_text("model:")
    open_run_dir(tmp_path, config(), resume=False)
    (tmp_path / ".report.html.tmp-123").write_text("<")
    open_run_dir(tmp_path, config(), resume=True)
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
