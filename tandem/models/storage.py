"""Tensors on disk, whole or in shards: every rank reads and writes its own part, whoever wrote or reads the rest.

model/model.safetensors, or model-00001-of-00004.safetensors, … and their index     whole weights, each in one file
state/rank_00000.safetensors, …     a rank's parts of tensors; the header says where each lies in the whole
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PIECES = "pieces"
"""The entry of a file's header that says where its tensors lie in the whole ones."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that is still to be written, by any thread."""

    path: Path
    tensors: Mapping[str, Tensor]
    """In host memory; what is trained meanwhile does not change them."""
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    def write(self) -> None:
        """Write it into its directory, which there is."""
        save_file(dict(self.tensors), self.path, metadata=dict(self.metadata))


class ShardRegion(NamedTuple):
    """Where a rank's part of a tensor lies in the whole."""

    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """By dimension."""
    shape: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def shared(self, other: "ShardRegion") -> tuple[slice, ...] | None:
        """What both hold, by dimension of the whole tensor; None where that is nothing."""
        starts = [max(pair) for pair in zip(self.start, other.start, strict=True)]
        ends = [min(pair) for pair in zip(self._end, other._end, strict=True)]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return tuple(map(slice, starts, ends))

    def within(self, region: tuple[slice, ...]) -> tuple[slice, ...]:
        """A region of the whole tensor, counted from where this piece starts."""
        return tuple(slice(one.start - start, one.stop - start) for one, start in zip(region, self.start, strict=True))

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.start, self.shape, strict=True))


def own_pieces(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ShardRegion]]:
    """This rank's part of each tensor that it is to write, not copies: over all ranks, every tensor exactly once."""
    found: dict[str, tuple[Tensor, ShardRegion]] = {}
    for name, tensor in tensors.items():
        local, piece = _local(tensor)
        if _is_first_copy(tensor) and not piece.empty:
            found[name] = local, piece
    return found


def shard_file(pieces: Mapping[str, tuple[Tensor, ShardRegion]], directory: Path) -> TensorFile:
    """The file of this rank's pieces; a rank without any writes one, too."""
    places = {name: piece for name, (_, piece) in pieces.items()}
    metadata = {_PIECES: json.dumps(places)}  # one entry: several would be written in any order
    path = directory / f"rank_{_rank():05d}.safetensors"
    return TensorFile(path, {name: tensor for name, (tensor, _) in pieces.items()}, metadata)


def read_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill this rank's part of each tensor (a DTensor, or a whole one) from the `shard_file`s in a directory.

    ValueError, and nothing changed, when a name or a shape differs, or files are missing or damaged.
    """
    with ExitStack() as opened:
        try:
            paths = sorted(directory.glob("rank_*.safetensors"))
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        saved = [_places(file) for file in files]
        _check_whole(tensors, saved)
        for name, tensor in tensors.items():
            local, wanted = _local(tensor)
            for file, places in zip(files, saved, strict=True):
                region = None if name not in places else places[name].shared(wanted)
                if region is not None:
                    source = places[name].within(region)
                    local[wanted.within(region)].copy_(
                        file.get_slice(name)[source] if source else file.get_tensor(name)
                    )


def _check_whole(tensors: Mapping[str, Tensor], saved: list[dict[str, ShardRegion]]) -> None:
    """Raises ValueError where the pieces are not those of these tensors, and all of them."""
    if not saved:
        raise ValueError("it has no rank_00000.safetensors, as this version of Tandem writes")
    found = {name: piece.whole for places in saved for name, piece in places.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if different := ours.items() ^ found.items():
        raise ValueError(f"names or shapes differ, as those of {min(different)[0]}")
    there = dict.fromkeys(ours, 0)
    for places in saved:
        for name, piece in places.items():
            there[name] += prod(piece.shape)
    if lacking := [name for name, tensor in tensors.items() if there[name] != tensor.numel()]:
        raise ValueError(f"files of ranks are missing: {lacking[0]} is not whole")


def _places(file: Any) -> dict[str, ShardRegion]:
    described: dict[str, Any] = json.loads((file.metadata() or {}).get(_PIECES, "{}"))
    return {name: ShardRegion(*(tuple(part) for part in parts)) for name, parts in described.items()}


def _local(tensor: Tensor) -> tuple[Tensor, ShardRegion]:
    """This rank's part, and where it lies."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return tensor, ShardRegion(shape, (0,) * len(shape), shape)
    local = tensor.to_local()
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, ShardRegion(tuple(tensor.shape), tuple(start), tuple(local.shape))


def _is_first_copy(tensor: Tensor) -> bool:
    """Of a part that several ranks hold, this one is the rank that writes it."""
    if not isinstance(tensor, DTensor):
        return _rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    placed = zip(tensor.placements, coordinate, strict=True)
    return all(place == 0 for placement, place in placed if isinstance(placement, Replicate))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def read_safetensors(
    tensors: Mapping[str, Tensor], directory: Path, named: Callable[[str], str] = lambda saved: saved
) -> set[str]:
    """Fill this rank's part of each tensor from a model directory; returns the names that it lacks.

    `named`: which tensor a name in the directory stands for.
    """
    reader = HuggingFaceStorageReader(str(directory))
    saved = {named(name): name for name in reader.read_metadata().state_dict_metadata}
    lacking = tensors.keys() - saved.keys()
    _read({saved[name]: tensor for name, tensor in tensors.items() if name not in lacking}, reader)
    return lacking


def _read(tensors: Mapping[str, Tensor], reader: Any) -> None:
    """What `torch.distributed.checkpoint.load` does, without asking the other ranks."""
    metadata, planner = reader.read_metadata(), DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
