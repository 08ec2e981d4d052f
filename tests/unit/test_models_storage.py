"""Tensors on disk at one rank: names that differ there, several files, other dtypes, states that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.models.storage import own_pieces, read_safetensors, read_shards, shard_file


def test_a_model_directory_is_read_by_name_into_the_dtype_that_is_asked(tmp_path: Path) -> None:
    save_file({"body.first": torch.tensor([1.5, 2.5])}, tmp_path / "model-00001-of-00002.safetensors")
    second = {"second": torch.ones(2, 3, dtype=torch.bfloat16), "other": torch.zeros(9)}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    tensors = {name: torch.full(shape, 7.0) for name, shape in (("body.first", (2,)), ("body.second", (2, 3)))}

    def named(saved: str) -> str:
        return "body.second" if saved == "second" else saved

    assert read_safetensors({**tensors, "head": torch.zeros(1)}, tmp_path, named) == {"head"}
    assert tensors["body.first"].tolist() == [1.5, 2.5]
    assert tensors["body.second"].dtype == torch.float32 and (tensors["body.second"] == 1).all()


def test_a_weight_of_another_shape_is_an_error(tmp_path: Path) -> None:
    save_file({"first": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="first"):
        read_safetensors({"first": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize("changed", [{"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {}])
def test_a_state_with_other_names_or_shapes_changes_nothing(changed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    state = {"a": torch.tensor([1.0, 2.0]), "step": torch.tensor(3.0)}
    shard_file(own_pieces(state), tmp_path).write()
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read_shards(found, tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)
    other = {"step": torch.zeros(()), **changed}
    with pytest.raises(ValueError, match="names or shapes differ"):
        read_shards(other, tmp_path)
    assert not any(tensor.any() for tensor in other.values())
