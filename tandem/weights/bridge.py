"""Weights from one pool of processes to another: rank 0 of the first broadcasts to every rank of the second.

    named_weights() --buckets--> Bridge.send ~~> Bridge.receive --(name, tensor)--> load_weights(version, …)

The pools are worlds of their own; a bridge is a third one, of the sender (rank 0) and the receivers (1 … n). Either
side holds one bucket besides its own weights.
"""

import json
import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tandem.weights.delta import decode, encode

_TIMEOUT = timedelta(minutes=30)
_BUCKET_BYTES = 64 * 2**20


class Bridge:
    """One end. Calls pair up: each `send` with a `receive` on every receiver."""

    def __init__(self, store: TCPStore, rank: int, receivers: int, delta: bool) -> None:
        self.address = f"{store.host}:{store.port}:{receivers}:{int(delta)}"
        self._delta = delta
        self.held: dict[str, Tensor] = {}
        """All weights as they were sent or received last, with `delta` alone."""
        self._store = store
        self._rank = rank
        self._receivers = receivers
        self._made: Any = None

    @classmethod
    def open(cls, receivers: int, host: str = "127.0.0.1", delta: bool = False) -> Self:
        """The sender's end, on a free port of `host`: returns at once; `address` is what receivers need.

        `delta`: from the second time on only what changed is sent.
        """
        return cls(TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT), 0, receivers, delta)

    @classmethod
    def join(cls, address: str, receiver: int) -> Self:
        """The end of receiver 0, 1, …"""
        host, port, receivers, delta = address.rsplit(":", 3)
        store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
        return cls(store, receiver + 1, int(receivers), delta == "1")

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each tensor's bytes, in its own dtype, in buckets of about 64 MiB."""
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in encode(weights, self.held) if self._delta else weights:
            bucket.append((name, tensor))
            if sum(t.nbytes for _, t in bucket) >= _BUCKET_BYTES:
                self._send_bucket(bucket)
                bucket = []
        if bucket:
            self._send_bucket(bucket)
        self._broadcast(torch.zeros(1, dtype=torch.int64))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the CPU), to be used before the next one is asked for."""
        return decode(self._receive(), self.held) if self._delta else self._receive()

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        while size := int(self._broadcast(torch.zeros(1, dtype=torch.int64))):
            header = self._broadcast(torch.empty(size, dtype=torch.uint8))
            tensors = [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(bytes(header.numpy()))]
            sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in tensors]
            payload = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8))
            for (name, dtype, shape), part in zip(tensors, payload.split(sizes), strict=True):
                yield name, part.clone().view(dtype).view(shape)

    def _send_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        header = json.dumps([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in bucket]).encode()
        self._broadcast(torch.tensor([len(header)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._broadcast(torch.cat([t.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, t in bucket]))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        self._group.broadcast(tensor, 0).wait()
        return tensor

    @property
    def _group(self) -> Any:
        """Made at the first use, where both sides meet: `open` must not wait for receivers that do not know it yet."""
        if self._made is None:
            store = PrefixStore("bridge", self._store)
            self._made = ProcessGroupGloo(store, self._rank, self._receivers + 1, _TIMEOUT)
        return self._made
