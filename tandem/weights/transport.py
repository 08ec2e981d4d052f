"""Bytes from process to process, outside the worlds of either pool: NCCL between GPUs, gloo otherwise."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import EngineError

TIMEOUT = timedelta(minutes=30)


class Operation(NamedTuple):
    """A tensor to be sent to a peer, or to be filled by it."""

    sends: bool
    tensor: Tensor
    peer: int
    tag: int = 0
    """Of messages between two, those of one tag arrive in their order."""


class Wire:
    """A group of processes that send one another tensors."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        """Every rank makes it at the same time."""
        self.device = device
        """Where tensors are."""
        if device.type == "cuda":
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, TIMEOUT)  # type: ignore[attr-defined]
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)  # type: ignore[attr-defined]
        # NCCL's batches of some ranks need a communicator that all have made
        self._group.allreduce([torch.zeros(1, device=device)]).wait()

    def post(self, operations: Sequence[Operation]) -> list[Any]:
        """Begin all; `wait` ends them. The order among peers does not matter."""
        if not operations:
            return []
        together: bool = self._group.supports_coalescing
        if together:
            self._group._start_coalescing()
        works = [
            (self._group.send if operation.sends else self._group.recv)(
                [operation.tensor], operation.peer, operation.tag
            )
            for operation in operations
        ]
        return [self._group._end_coalescing()] if together else works


def wait(works: Sequence[Any]) -> None:
    """Until everything is sent and received. Raises EngineError where a peer is gone."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise EngineError(f"weights between pools: a process at the other end is gone or silent: {error}") from error


def own_device() -> torch.device:
    """This process's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def name_of(device: torch.device) -> str:
    """One for each GPU of all machines; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
