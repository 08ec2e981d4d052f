"""A tensor as this rank holds it, and as all ranks together do, whether it is sharded or not."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part, which shares its memory; all of a tensor that has no shards."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it; every rank of its mesh calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: Tensor) -> int:
    """How many ranks hold a part of it each; 1 where it has no shards."""
    placed: Any = tensor
    return placed.device_mesh.size(placed.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 1
