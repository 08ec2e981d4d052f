"""Tensors on disk, whole or in shards: every rank reads and writes its own part, whoever wrote or reads the rest."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_saver import save


def read_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill this rank's part of each tensor (a DTensor, or a whole one) with what `write_shards` wrote.

    ValueError, and nothing changed, when a name or a shape differs.
    """
    reader = FileSystemReader(directory)
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    saved = {name: tuple(described.size) for name, described in found.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if different := ours.items() ^ saved.items():
        raise ValueError(f"names or shapes differ, as those of {min(different)[0]}")
    _read(tensors, reader)


def write_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """One file a rank in the format of torch.distributed.checkpoint; all ranks call it together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is but one rank
        save(dict(tensors), checkpoint_id=directory)


def read_safetensors(tensors: Mapping[str, Tensor], directory: Path, prefix: str) -> set[str]:
    """Fill this rank's part of each tensor from a model directory; returns the names that it lacks.

    A name may stand there without `prefix`, as in directories of a model without its output layer.
    """
    reader = HuggingFaceStorageReader(str(directory))
    saved = reader.read_metadata().state_dict_metadata
    names = {name: name if name in saved else name.removeprefix(f"{prefix}.") for name in tensors}
    lacking = {name for name in tensors if names[name] not in saved}
    _read({names[name]: tensor for name, tensor in tensors.items() if name not in lacking}, reader)
    return lacking


def _read(tensors: Mapping[str, Tensor], reader: Any) -> None:
    """What `torch.distributed.checkpoint.load` does, without asking the other ranks."""
    metadata, planner = reader.read_metadata(), DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
