"""One program on every cluster: the same prompts, rewards and metrics, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem
from tandem.cli import main
from tandem.config.model import ModelConfig
from tandem.jobs.runs import find_runs
from tandem.models.loading import load_policy, load_tokenizer
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories
from tests import programs
from tests.conftest import ROOT
from tests.programs import PYTHON

STEPS = 6
SPLIT = {
    "pools": {"acting": [2], "judging": [1], "asking": [1]},
    "roles": {"actor": "acting", "critic": "judging", "reference": "judging", "rollout": "asking"},
}
RUNS: dict[str, dict[str, Any]] = {
    "local, 2 ranks": {"cluster": {"type": "local", "ranks": 2}},
    "local, split": {"cluster": {"type": "local"}, "placement": SPLIT},
    "ray, 1 rank": {"cluster": {"type": "ray", "ranks": 1}},
    "ray, 2 ranks": {"cluster": {"type": "ray", "ranks": 2}},
    "ray, split": {"cluster": {"type": "ray"}, "placement": SPLIT},
}
MEGATRON = {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}}
if find_spec("megatron"):
    RUNS |= {
        f"megatron, {name}": {"cluster": {"ranks": 2}, "training": {"type": "megatron", **degrees}}
        for name, degrees in MEGATRON.items()
    }


def marks_of(case: str) -> Sequence[pytest.MarkDecorator]:
    """Each kind of cluster, and roles on several pools, are tried at once; the rest is their product."""
    return () if case in ("local, split", "ray, 2 ranks") else [pytest.mark.nightly]


@pytest.fixture(scope="module")
def recipe(every_role: dict[str, Any]) -> dict[str, Any]:
    return {**every_role, "trainer": {"steps": STEPS}}


def run(recipe: dict[str, Any], directory: Path, changes: dict[str, Any]) -> Path:
    tree = {**recipe, **changes, "trainer": {**recipe["trainer"], "run_dir": str(directory / "run")}}
    tree["training"] = recipe["training"] | changes.get("training", {})
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(directory / "config.yaml")]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def one_process(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(recipe, tmp_path_factory.mktemp("one"), {})


@pytest.fixture(scope="module")
def one_step_off(recipe: dict[str, Any]) -> dict[str, Any]:
    """Each answer has one version, so that the run is the same wherever it runs. So few samples decode at once that
    those of the next step are under way when training begins."""
    return {
        **recipe,
        "generation": {**recipe.get("generation", {}), "partial_rollouts": False, "max_running": 4},
        "trainer": {**recipe["trainer"], "max_staleness": 1},
    }


@pytest.fixture(scope="module")
def one_process_one_step_off(one_step_off: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(one_step_off, tmp_path_factory.mktemp("one_step_off"), {})


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in RUNS])
def test_the_run_is_that_of_one_process(case: str, one_process: Path, recipe: dict[str, Any], tmp_path: Path) -> None:
    expect_same(run(recipe, tmp_path, RUNS[case]), one_process)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks_of(case)) for case in ("local, 2 ranks", "local, split", "ray, split")]
)
def test_one_step_off_it_is_too(
    case: str, one_process_one_step_off: Path, one_step_off: dict[str, Any], tmp_path: Path
) -> None:
    expect_same(run(one_step_off, tmp_path, RUNS[case]), one_process_one_step_off)
    last = read_metrics(one_process_one_step_off / "metrics.jsonl")[-1]
    assert last["rollout/staleness/mean"] == last["rollout/staleness/max"] == 1 and last["rollout/mixed_share"] == 0


def expect_same(there: Path, one_process: Path) -> None:
    for step in range(1, STEPS + 1):
        used, expected = (
            read_trajectories(path / f"trajectories/step_{step:06d}.parquet", ["prompt_index", "sample", "reward"])
            for path in (there, one_process)
        )
        assert used.equals(expected), f"step {step}"
    records = read_metrics(there / "metrics.jsonl"), read_metrics(one_process / "metrics.jsonl")
    assert len(records[0]) == len(records[1]) == STEPS
    for record, expected in zip(*records, strict=True):
        names = {name for name in expected if not name.startswith(("time/", "perf/"))}
        assert names == {name for name in record if not name.startswith(("time/", "perf/"))}
        for name in names - {"rollout/mismatch_kl", "rollout/mismatch_max"}:  # rounding errors themselves
            close = math.isclose(record[name], expected[name], rel_tol=1e-4, abs_tol=1e-6)
            assert close, f"step {expected['step']}: {name} {record[name]} is not {expected[name]}"


@pytest.mark.parametrize(
    "cluster",
    [["cluster.type=local"], pytest.param(["cluster.type=ray", "cluster.ranks=2"], marks=pytest.mark.nightly)],
)
def test_a_dataflow_of_ones_own_runs_everywhere(cluster: list[str], recipe: dict[str, Any], tmp_path: Path) -> None:
    printed = example("best_of_n.py", recipe, tmp_path, *cluster).splitlines()[-3:]
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in printed]
    assert len(rewards) == 3 and rewards[-1] > rewards[0]
    saved = ModelConfig.model_validate({"path": tmp_path / "run"})
    assert saved.path == tmp_path / "run/checkpoints/step_000003/model" and len(load_tokenizer(saved)) == 99
    start, end = (load_policy(ModelConfig(path=path)).state_dict() for path in (recipe["model"]["path"], saved.path))
    assert any((start[name] != end[name]).any() for name in start)
    [listed] = find_runs(tmp_path)
    assert (listed.path, listed.state, listed.step, listed.best) == (tmp_path / "run", "finished", "3/3", "")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("trainer.resume=true", "trainer.resume: a dataflow of your own always starts"),
        ("trainer.max_staleness=1", "trainer.max_staleness: in a dataflow of your own the loop says"),
        ("model.reward_model_path={model}", "model.reward_model_path: a dataflow of your own is scored by functions"),
    ],
)
def test_a_dataflow_refuses_what_it_would_not_do(recipe: dict[str, Any], tmp_path: Path, wrong: str, told: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**recipe, "trainer": {"steps": 3, "run_dir": str(tmp_path / "run")}}))
    config = tandem.load_config(tandem.TrainConfig, path, [wrong.format(model=recipe["model"]["path"])])
    with pytest.raises(tandem.UserError, match=told):
        tandem.Dataflow(config)


def test_two_dataflows_do_not_write_one_run_directory(recipe: dict[str, Any], tmp_path: Path) -> None:
    example("best_of_n.py", recipe, tmp_path)
    config = tandem.load_config(tandem.TrainConfig, tmp_path / "config.yaml")
    with pytest.raises(tandem.UserError, match="holds another run"), tandem.Dataflow(config):
        pass


@pytest.mark.nightly
def test_the_trainer_of_the_articles(recipe: dict[str, Any], tmp_path: Path) -> None:
    example("ray_ppo_trainer.py", recipe, tmp_path, "cluster.ranks=2")
    assert [record["step"] for record in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


def example(name: str, recipe: dict[str, Any], directory: Path, *overrides: str) -> str:
    """What the example prints in three steps."""
    tree = {**recipe, "trainer": {"steps": 3, "run_dir": str(directory / "run")}}
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    command = [PYTHON, str(ROOT / "examples" / name), str(directory / "config.yaml"), *overrides]
    done = programs.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
