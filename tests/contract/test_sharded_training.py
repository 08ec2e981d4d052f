"""FSDP2 on 2, 3 and 4 ranks equals one rank: losses, metrics, gradient norms, weights, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_file_of
from transformers import AutoModelForCausalLM

from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.planning.fsdp_memory import FsdpSizes, copied_for_checkpoint
from tandem.planning.model_shape import read_shape
from tandem.training.fsdp import make_engine
from tests.conftest import ROOT, load_file
from tests.optimizers import OPTIMIZERS

Findings = dict[str, Any]
SCRIPT = Path(__file__).with_name("sharded_training.py")
sharded = load_file(SCRIPT)
TRAINED = [(2, case) for case in sharded.CASES] + [(3, "untied")]
TRAINED += [(4, case) for case in ("tied", "critic", *sharded.HYBRID)]

ONE_RANK = ("tied", "untied", "gpt2", "critic", "lora", "lora critic", "lora reward model", "buffers", *sharded.MIXERS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a checkpoint of one rank, and what worlds of several ranks found: one launch for the whole module."""
    directory = tmp_path_factory.mktemp("sharded")
    sharded.write_models(directory)
    sharded.saved(directory, 0, 1)
    for kind in OPTIMIZERS:
        sharded.moved(directory, kind, 1)
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
def worlds(directory: Path) -> dict[int, Findings]:
    return {ranks: torch.load(directory / f"{ranks}.pt") for ranks in (2, 3, 4)}


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Findings]:
    """One rank's findings, by case; sharding options change nothing there."""
    return {case: sharded.trained(directory, case, 0, 1) for case in ONE_RANK}


@pytest.fixture(scope="module")
def alone_losses(directory: Path) -> dict[str, dict[str, float]]:
    return sharded.losses(directory, 0, 1)


def assert_steps(found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def assert_weights(found: Findings, wanted: Findings, atol: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize(("ranks", "case"), TRAINED)
def test_shards_make_up_the_weights(ranks: int, case: str, worlds: dict[int, Findings]) -> None:
    """Bit by bit; with adapters, products of rows may round otherwise than those of the whole."""
    found = worlds[ranks]["trained"][case]
    assert_weights(found["from shards"], found["weights"], atol=1e-7 if "lora" in case else 0)


@pytest.mark.parametrize(("ranks", "case"), TRAINED)
def test_three_steps_equal_those_of_one_rank(
    ranks: int, case: str, worlds: dict[int, Findings], alone: dict[str, Findings]
) -> None:
    """Rows are spread unevenly, in the second step the last rank has none."""
    found, wanted = worlds[ranks]["trained"][case], alone.get(case, alone["tied"])
    assert_steps(found["steps"], wanted["steps"])
    assert_weights(found["weights"], wanted["weights"])
    assert found["said"].keys() == wanted["said"].keys()
    for place, values in wanted["said"].items():
        assert found["said"][place] == pytest.approx(values, abs=1e-5)
    assert wanted["steps"][0]["grad_norm"] > sharded.OPTIMIZER.max_grad_norm / 5


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("case", sharded.SAVED)
def test_a_checkpoint_loads_at_any_number_of_ranks(
    saved: int, resumed: int, case: str, worlds: dict[int, Findings], alone: dict[str, Findings]
) -> None:
    found, wanted = worlds[resumed]["resumed"][saved][case], alone[case]
    assert_steps(found["steps"], wanted["steps"][2:])
    assert_weights(found["weights"], wanted["weights"])


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(1, "tied"), (2, "tied"), (4, "tied"), (1, "critic"), (2, "critic"), (1, "lora"), (1, "lora reward model")],
)
def test_what_a_checkpoint_copies_is_what_planning_counts(
    ranks: int, case: str, directory: Path, worlds: dict[int, Findings]
) -> None:
    """Of the rank with the most, whose files are written from its copies."""
    checkpoint, held = directory / f"saved at {ranks}" / case, [0] * ranks
    for part in ("model", "state", "adapter"):
        for rank, path in enumerate(sorted((checkpoint / part).glob("*.safetensors"))):
            held[rank] += sum(tensor.nbytes for tensor in load_file_of(path).values())
    how: dict[str, Any] = {
        "value_head": case in ("critic", "lora reward model"),
        "lora_rank": 3 if case.startswith("lora") else 0,
    }
    engine = FsdpSizes(read_shape(checkpoint / "model"), ranks, 4, **how)
    assert copied_for_checkpoint(engine) == pytest.approx(max(held), rel=0.03)
    if ranks == 1:
        model: Any = sharded.engine(directory, case)
        (copied := directory / f"copies of {case}").mkdir()
        model.save(copied)
        assert sum(tensor.nbytes for tensor in model._copies._kept.values()) == held[0]


@pytest.mark.parametrize("case", [case for case in sharded.SAVED if "lora" in case])
def test_the_adapters_of_several_ranks_are_those_of_one(
    case: str, directory: Path, worlds: dict[int, Findings]
) -> None:
    """In PEFT's names, with the head of a reward model."""
    one, *others = (directory / f"saved at {ranks}" / case / "adapter" for ranks in (1, 2, 4))
    wanted = load_file_of(one / "adapter_model.safetensors")
    assert len(wanted) == 2 * 2 * 7 + ("reward" in case)
    assert ("base_model.model.score.weight" in wanted) == ("reward" in case)
    for other in others:
        assert_weights(load_file_of(other / "adapter_model.safetensors"), wanted)
        assert (other / "adapter_config.json").read_text() == (one / "adapter_config.json").read_text()


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_matrices_move_as_on_one_rank_to_the_bit(kind: str, directory: Path, worlds: dict[int, Findings]) -> None:
    """Of the same gradient: two steps, two more after one rank's checkpoint, and two of one rank after a world's.

    Vectors are torch's AdamW's, which rounds the last few numbers of a tensor otherwise than those before.
    """
    start, wanted = directory / f"{kind} at 1", sharded.moved(directory, kind, 1)
    onward = sharded.moved(directory, kind, 1, start)
    assert not any(torch.equal(onward[name], tensor) for name, tensor in wanted.items())
    for ranks, found in worlds.items():
        back = sharded.moved(directory, kind, 1, directory / f"{kind} at {ranks}")
        for ours, theirs in ((found["moved"][kind], wanted), (found["moved on"][kind], onward), (back, onward)):
            assert_weights(ours, theirs, atol=1e-8)
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if tensor.ndim == 2)


def test_a_checkpoint_of_two_ranks_loads_at_one(
    directory: Path, worlds: dict[int, Findings], alone: dict[str, Findings]
) -> None:
    for case, found in sharded.resumed(directory, 2, 0, 1).items():
        assert_steps(found["steps"], alone[case]["steps"][2:])
        assert_weights(found["weights"], alone[case]["weights"])


def test_the_state_of_another_model_is_refused(directory: Path, worlds: dict[int, Findings]) -> None:
    with pytest.raises(UserError, match="is not a training state of this model"):
        sharded.engine(directory, "critic").load(directory / "saved at 2" / "tied")


def test_the_model_directory_of_several_ranks_loads_with_transformers(
    directory: Path, worlds: dict[int, Findings]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory / "saved at 2" / "tied" / "model")
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == sharded.STOPS and model.generation_config.top_p == 0.8
    files = sorted(path.name for path in (directory / "saved at 2" / "tied" / "model").glob("model*"))
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files == [*shards, "model.safetensors.index.json"], "each rank writes its own"
    resumed = sharded.engine(directory, "tied")
    resumed.load(directory / "saved at 2" / "tied")
    assert_weights(dict(model.named_parameters()), sharded.weights(resumed), atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_directory_has_the_buffers_of_the_one_it_came_from(
    ranks: int, directory: Path, worlds: dict[int, Findings]
) -> None:
    first, saved = (
        {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file_of(file).items()}
        for path in (directory / "buffers", directory / f"saved at {ranks}" / "buffers" / "model")
    )
    assert saved.keys() == first.keys()
    buffers = [name for name in first if name.endswith(".beta")]
    assert buffers and all(torch.equal(saved[name], first[name]) for name in buffers)


@pytest.mark.parametrize("case", sharded.CONTEXT)
def test_context_parallel_equals_one_rank(case: tuple[str, bool], directory: Path, worlds: dict[int, Findings]) -> None:
    """Rank 0's answers are those of all scored tokens of its group's micro-batches."""
    ranks = 4 if case in sharded.IN_FOUR else 2
    found, wanted = worlds[ranks]["context"][case], sharded.contextual(directory, *case, 0, 1)
    assert_steps(found["steps"], wanted["steps"])
    assert_weights(found["weights"], wanted["weights"])
    whole = ranks == 2 or case == ("tied", True)
    for ours, theirs in zip(found["said"], wanted["said"], strict=True):
        assert len(ours) > 0 and (not whole or len(ours) == len(theirs))
        assert all(values == pytest.approx(theirs[place], abs=1e-5) for place, values in ours.items())


@pytest.mark.parametrize("layout", ["two context-parallel groups", "four ranks"])
def test_every_loss_with_unequal_numbers_of_micro_batches(
    layout: str, directory: Path, worlds: dict[int, Findings], alone_losses: dict[str, dict[str, float]]
) -> None:
    """Two micro-batches against one, and against none: losses, metrics and gradient norms are those of one rank."""
    found = worlds[4]["losses"][layout]
    assert found.keys() == alone_losses.keys()
    for name, wanted in alone_losses.items():
        assert found[name] == pytest.approx(wanted, rel=1e-5, abs=1e-5), name


def test_a_layout_that_does_not_divide_the_ranks_or_heads_is_refused(worlds: dict[int, Findings]) -> None:
    size, ranks, heads = worlds[3]["refused"]
    assert size.startswith("training.shard_size: 3 ranks cannot be cut into groups of 2")
    assert ranks.startswith("training.context_parallel: groups of 2 cannot share 3 ranks or 4 attention heads")
    assert heads.startswith("training.context_parallel: groups of 3 cannot share 3 ranks or 4 attention heads")


def test_bfloat16_stays_close_to_one_rank(directory: Path, worlds: dict[int, Findings]) -> None:
    found, wanted = worlds[2]["bfloat16"], sharded.bfloat16(directory, 0, 1)
    assert_steps(found["steps"], wanted["steps"], 2e-2)
    assert_weights(found["weights"], wanted["weights"], 2e-2)
    loaded = AutoModelForCausalLM.from_pretrained(directory / "bfloat16 at 2" / "model")
    assert_weights(dict(loaded.named_parameters()), found["weights"], 0)


def test_a_frozen_model_scores_as_one_rank_does(directory: Path, worlds: dict[int, Findings]) -> None:
    found, wanted = worlds[2]["frozen"], sharded.frozen(directory, 0, 1)
    for place, values in wanted.items():
        assert found[place] == pytest.approx(values, abs=1e-5)


def test_a_gradient_that_is_not_finite_stops_every_rank(worlds: dict[int, Findings]) -> None:
    assert "gradient norm is" in worlds[2]["not finite"] and "not finite first in model." in worlds[2]["not finite"]


def test_a_directory_that_lacks_a_weight_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directory / "tied" / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"cannot be loaded"):
        make_engine(ModelConfig(path=tmp_path), FsdpTrainingConfig(), None)
