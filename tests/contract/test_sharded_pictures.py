"""Models that see pictures on two FSDP ranks equal one rank: what they say, gradients, steps, checkpoints, engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_file_of
from transformers import AutoModelForImageTextToText

from tandem.pictures.vlm_config import in_tower
from tests.conftest import ROOT, load_file

SCRIPT = Path(__file__).with_name("sharded_pictures.py")
sharded = load_file(SCRIPT)
Findings = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    sharded.write_models(directory)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Findings:
    """One rank's findings, by case."""
    return {case: sharded.trained(models, case, 0, 1) for case in sharded.CASES}


@pytest.fixture(scope="module")
def directory(models: Path, alone: Findings) -> Path:
    """Models, checkpoints of one rank, and what two ranks found: one launch for the whole module."""
    directory = models
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[Findings]:
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def assert_steps(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-5, abs=1e-6)


def assert_close(found: Findings, wanted: Findings, tolerance: float) -> None:
    """Relative to the largest number of each. A bias of all keys changes no softmax: its gradient is rounding alone."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        least = 0.1 if name.endswith("k_proj.bias") else 1e-3
        assert (found[name] - tensor).abs().max() <= tolerance * tensor.abs().max().clamp_min(least), name


@pytest.mark.parametrize("case", sharded.CASES)
def test_gradients_and_steps_are_those_of_one_rank(case: str, ranks: list[Findings], alone: Findings) -> None:
    """A rank has no pictures, no rows, or fewer micro-batches than the other one."""
    wanted = alone[case]
    for findings in ranks:
        found = findings["trained"][case]
        for ours, theirs in zip([*found["first"], found["last"]], [*wanted["first"], wanted["last"]], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert_close(found["gradients"], wanted["gradients"], 2e-6)
        assert_steps(found["steps"], wanted["steps"])
        assert_close(found["weights"], wanted["weights"], 1e-5)
    towers = {name for name in wanted["gradients"] if in_tower(name)}
    assert bool(towers) == ("frozen" not in case and case != "lora")


@pytest.mark.parametrize("family", sharded.OTHERS)
def test_a_rank_of_any_family_may_show_no_picture(family: str, directory: Path, ranks: list[Findings]) -> None:
    wanted = sharded.one_pass(directory, family, 0, 1)
    assert any(in_tower(name) and tensor.any() for name, tensor in wanted.items())
    for findings in ranks:
        assert_close(findings["passes"][family], wanted, 2e-6)


@pytest.mark.parametrize("case", sharded.SAVED)
def test_a_checkpoint_resumes_at_any_number_of_ranks(
    case: str, directory: Path, ranks: list[Findings], alone: Findings
) -> None:
    """At the same number, bit for bit."""
    undisturbed = ranks[0]["trained"][case]
    same, other = ranks[0]["resumed"][2][case], ranks[0]["resumed"][1][case]
    assert same["steps"] == undisturbed["steps"][2:]
    assert all(torch.equal(tensor, undisturbed["weights"][name]) for name, tensor in same["weights"].items())
    assert_close(other["weights"], alone[case]["weights"], 1e-5)
    at_one = sharded.resumed_case(directory, case, 2, 0, 1)
    assert_steps(at_one["steps"], alone[case]["steps"][2:])
    assert_close(at_one["weights"], alone[case]["weights"], 1e-5)


def test_transformers_reads_what_two_ranks_save(directory: Path, ranks: list[Findings]) -> None:
    """Under the names that are published, the critic's head beside them."""
    families = {case: directory / sharded.family_of(case) / "model/model.safetensors" for case in sharded.SAVED}
    names = {case: load_file_of(path).keys() for case, path in families.items()}
    saved = {case: directory / "saved at 2" / case / "model" for case in sharded.SAVED}
    files = {case: [load_file_of(path) for path in sorted(saved[case].glob("*.safetensors"))] for case in saved}
    found = {case: {name: tensor for file in own for name, tensor in file.items()} for case, own in files.items()}
    assert found["llava"].keys() == names["llava"]
    assert found["critic"].keys() == names["critic"] | {"score.weight", "score.bias"}
    assert all(len(own) == 2 for own in files.values()), "each rank writes its own"
    model = AutoModelForImageTextToText.from_pretrained(saved["llava"])
    resumed = sharded.engine(directory, "llava")
    resumed.load(saved["llava"].parent)
    wanted = sharded.weights(resumed)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.named_parameters())


def test_native_engines_of_both_ranks_get_the_tower_that_has_learned(ranks: list[Findings]) -> None:
    for findings in ranks:
        for case in sharded.SERVED:
            differences = findings["trained"][case]["served"]
            assert len(differences) == 2 and max(differences) < 2e-5


def test_a_frozen_model_scores_as_one_rank_does(directory: Path, ranks: list[Findings]) -> None:
    wanted = sharded.scored(directory, 0, 1)
    assert len(wanted) > 30
    assert all(findings["scored"] == pytest.approx(wanted, abs=1e-5) for findings in ranks)


def test_a_reference_takes_up_a_tower_that_has_learned(directory: Path, ranks: list[Findings]) -> None:
    """It is whole on every rank there, in shards with the policy, and what was made of pictures before is forgotten."""
    for off in [sharded.refreshed(directory, 0, 1), *(findings["refreshed"] for findings in ranks)]:
        assert len(off) == 3 and max(off) < 1e-5
