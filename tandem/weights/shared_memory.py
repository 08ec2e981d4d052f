"""Weights in buckets through memory that sender and engines share: on one host, or CUDA IPC on one device.

    tensors --copy--> one half of the bucket ~~> engines load it, while the other half is filled

Beside the weights themselves there is one bucket, whatever the size of the model.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights.base import BucketHalf, Commit, Deliver, Weights

_ALIGNMENT = 64


class SharedMemorySync:
    """A WeightSync of two halves of memory, which are kept between publishes, but where a large tensor widened them."""

    def __init__(
        self, bucket_bytes: int, checksum: bool = False, source: Callable[[], Weights | None] | None = None
    ) -> None:
        """`source` gives the last weights once more, where that is possible between publishes."""
        self._halves = [_Half(bucket_bytes // 2), _Half(bucket_bytes // 2)]
        self._checksum = checksum
        self._source = source

    def publish(self, version: int, weights: Weights | None, deliver: Deliver) -> None:
        if weights is None:
            self._source = lambda: None
        filling, loading = self._halves
        filling.clear()  # of a publish that failed
        loading.clear()
        taken: Callable[[], None] = lambda: None  # noqa: E731
        for name, tensor in weights or ():
            if not filling.fits(tensor):
                sent = deliver(filling.pack(self._checksum))
                taken()
                taken, filling, loading = sent, loading, filling
            filling.add(name, tensor.detach())
        last = deliver(filling.pack(self._checksum)) if filling.entries else None
        taken()
        if last:
            last()
        for half in self._halves:
            half.shrink()
        deliver(Commit(version))()

    def repeat(self, version: int, deliver: Deliver) -> bool:
        if self._source is None:
            return False
        self.publish(version, self._source(), deliver)
        return True

    def close(self) -> None:
        for half in self._halves:
            half.close()


class _Half:
    """Memory that is filled tensor by tensor; a tensor larger than it takes a larger one's place."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._file: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.entries: list[tuple[str, str, tuple[int, ...], int]] = []

    def fits(self, tensor: Tensor) -> bool:
        return not self.entries or self._used + tensor.nbytes <= len(self._bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        wanted = max(self._size, tensor.nbytes)
        if not self.entries and (
            self._bytes.device != tensor.device or not tensor.nbytes <= len(self._bytes) <= wanted
        ):
            self._allocate(wanted, tensor.device)
        part = self._bytes[self._used : self._used + tensor.nbytes]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self._used))
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, checksum: bool) -> BucketHalf:
        if self._bytes.is_cuda:
            torch.cuda.synchronize()  # the engine reads on a stream of its own
        bucket = BucketHalf(self._memory(), tuple(self.entries))
        if checksum:
            bucket = BucketHalf(
                bucket.memory, bucket.tensors, tuple(fingerprint(t) for _, t in _views(self._bytes, bucket))
            )
        self.clear()
        return bucket

    def clear(self) -> None:
        self.entries = []
        self._used = 0

    def shrink(self) -> None:
        """Free what a tensor took that is larger than a half: on a GPU the models need it until the next publish."""
        if len(self._bytes) > self._size:
            self.close()

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _allocate(self, size: int, device: torch.device) -> None:
        self.close()
        if device.type == "cuda":
            self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
            return
        self._file = os.memfd_create("tandem-weights")  # has no name, so nothing of it outlives its users
        os.ftruncate(self._file, size)
        self._bytes = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def _memory(self) -> Any:
        if self._bytes.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(self._bytes)
        return self._path, len(self._bytes), os.stat(self._path).st_ino


def attach(bucket: BucketHalf) -> Iterator[tuple[str, Tensor]]:
    """The engine's end: (name, view of the shared memory). EngineError when a checksum differs."""
    first, *others = bucket.memory
    shared: Any = first(*others[0]) if callable(first) else _mapped(first, *others)
    for number, (name, tensor) in enumerate(_views(shared, bucket)):
        if bucket.checksums and fingerprint(tensor) != bucket.checksums[number]:
            raise EngineError(f"weight {name} arrived with another checksum than it was sent with")
        yield name, tensor


@lru_cache(maxsize=2)  # both halves stay mapped: to fault their pages in costs more than to copy them
def _mapped(path: str, size: int, inode: int) -> Tensor:  # `inode`: another file may get the same path
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def fingerprint(tensor: Tensor) -> int:
    """A checksum of bits and their places: the sum of each 16-bit word times an odd number of its position."""
    words = tensor.detach().contiguous().view(-1).view(torch.int16)
    total = 0
    for start in range(0, len(words), 1 << 20):
        part = words[start : start + (1 << 20)].to(torch.int64)
        place = torch.arange(start, start + len(part), device=part.device) * 2 + 1
        total += int((part * place).sum())  # wraps around
    return total & (2**64 - 1)


def _views(shared: Tensor, bucket: BucketHalf) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, start in bucket.tensors:
        dtype = getattr(torch, dtype_name)
        yield name, shared[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
