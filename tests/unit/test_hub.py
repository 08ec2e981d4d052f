"""Models and data by their ids on the Hub, and models pushed there: the real client against a stand-in on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tandem.hub import Pin, model_id, pins_in
from tandem.jobs.push import model_card
from tests.conftest import ROOT
from tests.hub_server import TOKEN, commit_of

Command = Callable[..., str]
EACH = """
import sys
from tandem.cli import main
for words in sys.argv[1].split("|"):
    print("status", main(words.split()), flush=True)
"""
FORKS = """
import json, os, sys, traceback
import tandem.jobs.debug, tandem.jobs.inputs
from tandem.cli import main

for line in sys.stdin:
    commands, environment, directory, printed = json.loads(line)
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        print("done", flush=True)
        continue
    try:
        os.environ.update(environment)
        os.chdir(directory)
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        for words in commands:
            print("status", main(words.split()), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
"""
"""Each in a fork of a process that has the expensive imports behind it, and has no threads."""


@pytest.fixture(scope="module")
def hub(sort4: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with `ada/sort`, a model, and `ada/rows`, a data set of two configurations, and where it is served."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(sort4 / "model", folder / "models/ada/sort/main")
    (folder / "models/ada/sort/main/pytorch_model.bin").write_text("nothing that is wanted")
    rows = folder / "datasets/ada/rows/main"
    for name, source in (("main/train-00000", "train"), ("main/test-00000", "val"), ("other/part_1", "val")):
        (rows / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sort4 / f"{source}.jsonl", rows / f"{name}.jsonl")
    card = {"configs": [{"config_name": "other", "data_files": [{"split": "train", "path": "other/*"}]}]}
    (rows / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\nRows.\n")
    program = [sys.executable, str(ROOT / "tests/hub_server.py"), str(folder)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield folder, server.stdout.readline().strip()
        server.terminate()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _environment(hub: tuple[Path, str], cache: Path) -> dict[str, str]:
    of_hub = {"HF_ENDPOINT": hub[1], "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **of_hub}


@pytest.fixture(scope="module")
def forks(hub: tuple[Path, str], cache: Path) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-c", FORKS]
    given = _environment(hub, cache)
    with subprocess.Popen(program, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def tandem(hub: tuple[Path, str], cache: Path, forks: subprocess.Popen[str], tmp_path: Path) -> Command:
    """Runs commands in one process; returns what they print. Of the environment, `huggingface_hub` reads the token when
    it is needed, and all else when it is imported: then the process is a new one."""

    def run(*commands: str, **environment: str) -> str:
        if environment.keys() - {"HF_TOKEN"}:
            program, given = [sys.executable, "-c", EACH, "|".join(commands)], _environment(hub, cache) | environment
            done = subprocess.run(program, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)
            return done.stdout + done.stderr
        assert forks.stdin is not None and forks.stdout is not None
        printed = tmp_path / "printed"
        forks.stdin.write(json.dumps([commands, environment, str(tmp_path), str(printed)]) + "\n")
        forks.stdin.flush()
        assert forks.stdout.readline() == "done\n"
        return printed.read_text()

    return run


@pytest.fixture
def config(grpo_config: Path) -> Path:
    tree = yaml.safe_load(grpo_config.read_text())
    tree["model"]["path"] = "ada/sort@main"
    tree["data"] |= {"train_files": ["hub:ada/rows/main[train]"], "val_files": ["hub:ada/rows/other"]}
    tree["trainer"]["steps"] = 1
    grpo_config.write_text(yaml.safe_dump(tree))
    return grpo_config


def test_a_run_is_made_of_ids_goes_on_when_they_moved_and_is_pushed(
    hub: tuple[Path, str], cache: Path, tandem: Command, config: Path, tmp_path: Path
) -> None:
    branches = hub[0] / "datasets/ada/rows"
    first = commit_of(branches / "main")
    assert "done: " in tandem(f"train {config}")
    resolved = (tmp_path / "run/config.yaml").read_text()
    assert pins_in(resolved) == {
        Pin("model", "ada/sort"): commit_of(hub[0] / "models/ada/sort/main"), Pin("dataset", "ada/rows"): first,
    }  # fmt: skip
    assert yaml.safe_load(resolved)["data"]["val_files"][0].endswith(f"{first}/other/part_1.jsonl")
    assert not list(cache.rglob("*.bin"))
    shutil.copytree(branches / "main", branches / "before")
    with (branches / "main/main/train-00000.jsonl").open("a") as file:
        file.write('{"prompt": "1=", "data_source": "sort4", "reward_model": {"ground_truth": "1"}}\n')
    went_on = tandem(f"train {config} --resume {tmp_path}/run trainer.steps=2")
    assert "done: " in went_on, went_on
    with (tmp_path / "run/metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "rew')  # as a killed run leaves it
    adapter = tmp_path / "run/checkpoints/step_000002/adapter"  # as a run of LoRA has it
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    to = f"push {tmp_path}/run ada"
    pushed = tandem(f"{to}/made", f"{to}/closed_one --private", f"{to}/made --step 1 --revision first", HF_TOKEN=TOKEN)
    assert pushed.count("uploaded: ") == 3, pushed
    assert (hub[0] / "models/ada/closed_one/private").exists() and (
        hub[0] / "models/ada/made/first/config.json"
    ).exists()
    assert not any(
        TOKEN in file.read_text("utf-8", "ignore") for file in (tmp_path / "run").rglob("*") if file.is_file()
    )
    assert "nothing was uploaded to ada/made" in tandem(f"{to}/made", HF_TOKEN=TOKEN, HF_HUB_OFFLINE="1")
    assert pins_in((tmp_path / "run/config.yaml").read_text())[Pin("dataset", "ada/rows")] == first
    made = hub[0] / "models/ada/made/main"
    card = (made / "README.md").read_text()
    assert "base_model: ada/sort" in card and "step 2" in card and "ada/rows" in card and "type: grpo" in card
    assert (made / "adapter/adapter_config.json").read_text() == "{}" and 'subfolder="adapter"' in card
    assert "adapter" not in (hub[0] / "models/ada/made/first/README.md").read_text()
    assert "| step | reward/mean" in card and str(tmp_path) not in card and "/home" not in card
    assert sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(made).parameters())
    again = tandem(f"train {config} model.path=hub:ada/made trainer.run_dir=second --dry-run", HF_TOKEN=TOKEN)
    assert "nothing is wrong" in again, again


def test_what_cannot_be_had_is_told(hub: tuple[Path, str], tandem: Command, config: Path, tmp_path: Path) -> None:
    """Each in one line, with status 2; nothing is written."""
    for repo, mark in (("closed", "private"), ("terms", "gated")):
        shutil.copytree(hub[0] / "models/ada/sort/main", hub[0] / f"models/ada/{repo}/main")
        (hub[0] / f"models/ada/{repo}" / mark).touch()
    (hub[0] / "models/ada/pickled/main").mkdir(parents=True)
    shutil.copy(hub[0] / "models/ada/sort/main/config.json", hub[0] / "models/ada/pickled/main/config.json")
    dry = f"train {config} --dry-run"
    told = tandem(
        f"{dry} model.path=ada/none", f"{dry} model.path=ada/closed", f"{dry} model.path=ada/terms",
        f"{dry} model.path=ada/sort@v9", f"{dry} model.path=ada/pickled", f'{dry} data.val_files=["hub:ada/rows[dev]"]',
        f"{dry} data.val_files=[hub:ada]", f"{dry} model.path=hub:ada/sort/inner", f"push {tmp_path}/none ada/made",
    )  # fmt: skip
    for line in (
        "model.path: there is no ada/none here, and none on the Hub", "model.path: there is no ada/closed here",
        "model.path: the model ada/terms is gated: accept its terms", "the model ada/sort has no revision 'v9'",
        "ada/pickled has no weights as safetensors", "hub:ada/rows[dev]: no file of the split 'dev'",
        "'ada' is no id of the Hub", "ada/sort/inner: a model is owner/name", "it has no checkpoint 'latest'",
    ):  # fmt: skip
        assert line in told, told
    assert told.count("status 2") == 9 and "Traceback" not in told and not (tmp_path / "run").exists()
    offline = tandem(dry, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert "and HF_HUB_OFFLINE is set; fetch it where there is a network (`hf download ada/sort`)" in offline
    gone = tandem(dry, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "empty"))
    assert "the Hub (http://127.0.0.1:9) does not answer" in gone


@pytest.mark.parametrize(
    "cut_off",
    [{"HF_ENDPOINT": "http://127.0.0.1:9"}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_what_the_cache_has_needs_no_network(cut_off: dict[str, str], tandem: Command, config: Path) -> None:
    dry = f"train {config} --dry-run"
    assert "nothing is wrong" in tandem(dry)
    assert "nothing is wrong" in tandem(dry, **cut_off)


def test_a_split_is_whole_or_refused(hub: tuple[Path, str], tandem: Command, config: Path, sort4: Path) -> None:
    rows = hub[0] / "datasets/ada"
    for name in ("shards/main/train-00000-of-00002", "shards/main/train-00001-of-00002", "two/main/easy/train",
                 "two/main/hard/train", "two/main/hard/train_raw"):  # fmt: skip
        (rows / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sort4 / "val.jsonl", rows / f"{name}.jsonl")
    dry = f"train {config} --dry-run trainer.run_dir=another"
    one = "shards/train-00000-of-00002.jsonl"
    assert "nothing is wrong" in tandem(f'{dry} data.train_files=["hub:ada/{one}"]')
    split = f'{dry} data.train_files=["hub:ada/shards"]'
    assert "its files at" in tandem(split, HF_HUB_OFFLINE="1"), "one of two shards is in the cache"
    told = tandem(split, f'{dry} data.train_files=["hub:ada/two"]', f'{dry} data.train_files=["hub:ada/two/hard"]')
    assert "train-00001-of-00002.jsonl" in told and told.count("nothing is wrong") == 2
    assert "hub:ada/two: it has several configurations; name one: easy, hard" in told and "train_raw" not in told


def test_local_paths_are_not_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert (
        model_id(Path("runs/typo")) is None and model_id(Path("models/typo")) is None and model_id(Path("/a/b")) is None
    )
    assert model_id(Path("one")) is None and model_id(Path("a/b/c")) is None
    assert model_id(Path("Qwen/Qwen3-0.6B@main")) == "Qwen/Qwen3-0.6B@main"
    assert model_id(Path("hub:runs/typo")) == "runs/typo"


def test_a_card_names_the_models_that_scored(tmp_path: Path) -> None:
    """Local ones by the last part of their paths, and a checkpoint by its run."""
    run, other = tmp_path / "run", tmp_path / "liked/checkpoints/step_000002/model"
    for name in ("plain", "judged"):
        models = {"path": "ada/sort", "reward_model_path": str(other), "judge_path": None, "teacher_path": "ada/large"}
        (run / name).mkdir(parents=True)
        config = {"model": models if name == "judged" else {"path": "ada/sort", "reward_model_path": None}}
        (run / name / "config.yaml").write_text(yaml.safe_dump(config))
        (run / name / "metrics.jsonl").write_text("")
    plain, judged = (
        model_card(run / name, run / name / "checkpoints/step_000002", "ada/it") for name in ("plain", "judged")
    )
    assert "\n\nReward model: liked. Teacher: large.\n\n" in judged and str(tmp_path) not in judged
    assert "Reward model" not in plain and "Judge" not in plain + judged
