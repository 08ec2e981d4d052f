"""A run that goes on elsewhere: other ranks, another layout, another engine. Prints how far numbers move."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.tracking.jsonl import read_metrics
from tandem.tracking.trajectories import read_trajectories, trajectories_path

SEGMENT = 2
"""Steps between moves."""
STEPS = 3 * SEGMENT
RANKS_1: dict[str, Any] = {"cluster": {"ranks": 1}}
RANKS_2: dict[str, Any] = {"cluster": {"ranks": 2}}
BALANCED: dict[str, Any] = {"cluster": {"ranks": 2}, "generation": {"balance": True, "max_running": 6}}
"""Which rank answers which prompt depends on time."""
CONTEXT_2: dict[str, Any] = {**RANKS_2, "training": {"context_parallel": 2}}
REPLICAS: dict[str, Any] = {**RANKS_2, "training": {"shard_size": 1, "tokens_per_micro_batch": 32}}
RAY: dict[str, Any] = {"cluster": {"type": "ray", "ranks": 2}}
SPLIT: dict[str, Any] = {
    "cluster": {},
    "placement": {
        "pools": {"acting": [2], "judging": [1], "asking": [1]},
        "roles": {"actor": "acting", "critic": "judging", "reference": "judging", "rollout": "asking"},
    },
}
MOVES: dict[str, list[dict[str, Any]]] = {
    "1 rank -> 2 ranks -> 1 rank": [RANKS_1, RANKS_2, RANKS_1],
    "2 ranks, balanced -> in fixed shares -> balanced": [BALANCED, RANKS_2, BALANCED],
    "FSDP 2 -> context parallel 2 -> 2 replicas": [RANKS_2, CONTEXT_2, REPLICAS],
    "one pool -> three pools -> Ray": [RANKS_2, SPLIT, RAY],
}
if find_spec("megatron"):
    TP_2, PP_2, ONE = (
        {"cluster": {"ranks": ranks}, "training": {"type": "megatron", **degrees}}
        for ranks, degrees in ((2, {"tensor_parallel": 2}), (2, {"pipeline_parallel": 2}), (1, {}))
    )
    MOVES["megatron TP 2 -> PP 2 -> 1 rank"] = [TP_2, PP_2, ONE]


QUICK = ("1 rank -> 2 ranks -> 1 rank", "megatron TP 2 -> PP 2 -> 1 rank")


def write_config(recipe: dict[str, Any], run: Path, layout: dict[str, Any], **trainer: Any) -> Path:
    tree = {**recipe, **layout, "trainer": {"run_dir": str(run), "keep_last": 9, **trainer}}
    for section in ("training", "generation"):
        tree[section] = {**recipe[section], **layout.get(section, {})}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    return path


def train(recipe: dict[str, Any], run: Path, layout: dict[str, Any], *arguments: str, **trainer: Any) -> Path:
    assert main(["train", str(write_config(recipe, run, layout, **trainer)), *arguments]) == 0
    return run


def numbers(run: Path, step: int) -> dict[str, float]:
    """Metrics of a step, but for times and for rounding errors themselves."""
    [record] = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] == step]
    measured = ("time/", "perf/", "rollout/mismatch")
    return {name: value for name, value in record.items() if not name.startswith(measured)}


def largest_difference(run: Path, undisturbed: Path, steps: range) -> tuple[float, str]:
    """Of all metrics of the steps, relative to the value (to 0.01 if that is smaller), and of which.

    The trajectories must be the same.
    """
    columns = ["prompt_index", "sample", "response_ids", "reward"]
    worst = (0.0, "none")
    for step in steps:
        found, expected = numbers(run, step), numbers(undisturbed, step)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            worst = max(worst, (abs(found[name] - value) / max(abs(value), 0.01), f"{name} at step {step}"))
        answers = (read_trajectories(trajectories_path(path, step), columns) for path in (run, undisturbed))
        assert next(answers).equals(next(answers)), f"step {step}: other answers"
    return worst


@pytest.fixture(scope="module")
def undisturbed(every_role: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All steps on one rank by the PyTorch engine."""
    return train(every_role, tmp_path_factory.mktemp("undisturbed") / "run", RANKS_1, steps=STEPS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in MOVES]
)
def test_a_run_that_moves_ends_as_the_undisturbed_one(
    name: str, every_role: dict[str, Any], undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for number, layout in enumerate(MOVES[name], start=1):
        train(every_role, run, layout, "--resume", str(run), steps=number * SEGMENT)
        told = capsys.readouterr().out
        assert (f"resuming after step {(number - 1) * SEGMENT}" in told) == (number > 1)
        assert f"trainer.steps: {(number - 1) * SEGMENT} -> {number * SEGMENT}" in told or number == 1
    if name == next(iter(MOVES)):
        train(every_role, run, MOVES[name][-1], "--resume", str(run), steps=SEGMENT)
        assert f"no step is left: the run has {SEGMENT}; trainer.steps=N lets it go on" in capsys.readouterr().out
    worst, where = largest_difference(run, undisturbed, range(1, STEPS + 1))
    with capsys.disabled():
        print(f"\nresume, {name}: {STEPS} steps, largest relative difference {worst:.1e} ({where})")
    assert worst < 1e-4, where


@pytest.mark.nightly
def test_a_run_that_generates_ahead_goes_on_elsewhere(
    every_role: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step ahead, where publishes wait: the checkpoint holds groups of the step after the next."""
    ahead = {**every_role, "generation": every_role["generation"] | {"partial_rollouts": False}}
    trainer: dict[str, Any] = {"steps": STEPS, "save_every": SEGMENT, "max_staleness": 1}
    undisturbed = train(ahead, tmp_path / "undisturbed", SPLIT, **trainer)
    for name, layout in {"2 ranks": RANKS_2, "Ray": RAY}.items():
        run = tmp_path / name
        shutil.copytree(undisturbed, run)
        (run / "checkpoints/latest").write_text(f"step_{SEGMENT:06d}\n")
        train(ahead, run, layout, "--resume", str(run), **trainer)
        assert f"resuming after step {SEGMENT}" in capsys.readouterr().out
        worst, where = largest_difference(run, undisturbed, range(1, STEPS + 1))
        with capsys.disabled():
            print(f"\nresume one step ahead, on {name}: largest relative difference {worst:.1e} ({where})")
        assert worst < 1e-4, where


@pytest.mark.skipif(not find_spec("megatron"), reason="Megatron-Core is not installed")
def test_one_process_trains_by_megatron_twice(every_role: dict[str, Any], tmp_path: Path) -> None:
    """Megatron-Core keeps its groups in globals, which outlive the process group of the first run."""
    first, second = (train(every_role, tmp_path / name, ONE, steps=1) for name in ("first", "second"))
    assert numbers(first, 1) == numbers(second, 1)


@pytest.mark.skipif(not find_spec("megatron"), reason="Megatron-Core is not installed")
def test_from_fsdp_to_megatron_by_the_weights_alone(
    every_role: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume refuses and names the branch; the branch equals a run that starts from the same model directories."""
    without_kl = {**every_role, "algorithm": every_role["algorithm"] | {"kl": {"place": "none"}}}
    fsdp = train(without_kl, tmp_path / "fsdp", RANKS_2, steps=SEGMENT)
    assert main(["train", str(write_config(without_kl, fsdp, TP_2, steps=STEPS)), "--resume", str(fsdp)]) == 2
    told = capsys.readouterr().err
    assert "- training.type: fsdp -> megatron" in told and f"trainer.branch_from={fsdp}" in told
    branch = train(without_kl, tmp_path / "branch", TP_2, steps=SEGMENT, branch_from=str(fsdp))
    told = capsys.readouterr().out
    assert "(the model: weights, with a new optimizer; the critic: weights, with a new optimizer)" in told
    critic = fsdp / f"checkpoints/step_{SEGMENT:06d}/critic/model"
    started = {**without_kl, "model": {"path": str(fsdp), "critic_path": str(critic)}}
    expected = train(started, tmp_path / "expected", RANKS_1, steps=SEGMENT)
    worst, where = largest_difference(branch, expected, range(1, SEGMENT + 1))
    with capsys.disabled():
        print(f"\nbranch, FSDP 2 -> Megatron TP 2: {SEGMENT} steps, largest relative difference {worst:.1e} ({where})")
    assert worst < 1e-4, where
