"""Weights from the ranks of one pool to those of another: by the schedule, against a broadcast of gathered weights.

    python benchmarks/weight_pools.py [--gib 0.5] [--senders 2] [--receivers 2] [--serve whole|tensor-parallel]

Training ranks hold row shards, as FSDP2's do, in processes of their own; receivers serve all rows, or each a part of
them. The broadcast is what a bridge was before: training ranks gather each weight, and rank 0 sends it to all of
the other pool in buckets. Both take turns in one run, over gloo; medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from command_line import parse_arguments
from torch import Tensor

from tandem.regions import Shard, chunk, shape_of, slices_in, whole
from tandem.weights.bridge import Receiver, Sender, open_bridge
from tandem.weights.transfer_schedule import Held, Layout

GIB = 2**30
BROADCAST_BYTES = 64 * 2**20


def shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Layers of a hidden size of 1,024, in bfloat16."""
    layer = {"qkv": (3072, 1024), "o": (1024, 1024), "gate_up": (8192, 1024), "down": (1024, 4096), "norm": (1024,)}
    size = sum(torch.Size(shape).numel() * 2 for shape in layer.values())
    layers = max(1, round(gib * GIB / size))
    return {f"{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}


class Trainer:
    """A training rank, with a row shard of every weight."""

    def __init__(self, arguments: argparse.Namespace, rank: int, address: Any, training_group: Any) -> None:
        self._training_group = training_group
        self._first = rank == 0
        self._shards = [self._shard(name, shape, arguments.senders, rank) for name, shape in arguments.shapes.items()]
        self.end = Sender(address, rank, self._shards)

    def _shard(self, name: str, shape: tuple[int, ...], ranks: int, rank: int) -> Shard[Tensor]:
        region = chunk(whole(shape), 0, ranks, rank)
        values = torch.full(shape_of(region), 1.0 + rank, dtype=torch.bfloat16)
        return Shard(name, shape, "bfloat16", region, lambda: values)

    def schedule(self) -> None:
        self.end.send(self._shards)

    def broadcast(self) -> None:
        bucket: list[Tensor] = []
        for shard in self._shards:
            parts = [torch.empty_like(shard.read()) for _ in range(self._training_group.size())]
            dist.all_gather(parts, shard.read(), group=self._training_group)
            bucket.append(torch.cat(parts))
            if sum(tensor.nbytes for tensor in bucket) >= BROADCAST_BYTES:
                self._send(bucket)
                bucket = []
        self._send(bucket)

    def _send(self, bucket: list[Tensor]) -> None:
        if self._first and bucket:
            dist.broadcast(torch.cat([tensor.view(-1) for tensor in bucket]), 0, group=receivers_group)


receivers_group: Any = None
"""Rank 0 and the receivers."""


class Server:
    """A serving rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int, address: Any) -> None:
        self._shapes: dict[str, tuple[int, ...]] = arguments.shapes
        parts = arguments.receivers if arguments.serve == "tensor-parallel" else 1
        layout: Layout = {
            name: Held(shape, "bfloat16", chunk(whole(shape), 0, parts, rank % parts))
            for name, shape in self._shapes.items()
        }
        self._layout = layout
        self._served = {name: torch.empty(shape_of(held.region), dtype=torch.bfloat16) for name, held in layout.items()}
        self.end = Receiver(address, rank, layout)

    def schedule(self) -> None:
        self.end.receive_into(self._served.__getitem__)

    def broadcast(self) -> None:
        bucket: list[str] = []
        for name in self._shapes:
            bucket.append(name)
            if self._bytes(bucket) >= BROADCAST_BYTES:
                self._take(bucket)
                bucket = []
        self._take(bucket)

    def _bytes(self, names: list[str]) -> int:
        return sum(2 * torch.Size(self._shapes[name]).numel() for name in names)

    def _take(self, names: list[str]) -> None:
        if not names:
            return
        payload = torch.empty(self._bytes(names) // 2, dtype=torch.bfloat16)
        dist.broadcast(payload, 0, group=receivers_group)
        parts = payload.split([torch.Size(self._shapes[name]).numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            shape = self._shapes[name]
            self._served[name].copy_(part.view(shape)[slices_in(whole(shape), self._layout[name].region)])

    @property
    def served_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._served.values())


def rank_main(rank: int, arguments: argparse.Namespace, directory: str) -> None:
    global receivers_group
    torch.set_num_threads(1)
    ranks = arguments.senders + arguments.receivers
    dist.init_process_group("gloo", f"file://{directory}/meet", timedelta(minutes=5), world_size=ranks, rank=rank)
    training_group = dist.new_group(list(range(arguments.senders)))
    receivers_group = dist.new_group([0, *range(arguments.senders, ranks)])
    opened: Any = open_bridge(arguments.senders, arguments.receivers) if rank == 0 else (None,)
    address = [opened[0]]
    dist.broadcast_object_list(address)
    if rank < arguments.senders:
        worker: Trainer | Server = Trainer(arguments, rank, address[0], training_group)
    else:
        worker = Server(arguments, rank - arguments.senders, address[0])
    seconds = {"schedule": [], "broadcast": []}
    for round_ in range(arguments.rounds + 1):
        for name, measured in seconds.items():
            dist.barrier()
            start_s = time.perf_counter()
            getattr(worker, name)()
            dist.barrier()
            if round_:  # the first one faults pages in
                measured.append(time.perf_counter() - start_s)
    said = {
        "received": worker.end.publish_bytes if isinstance(worker, Server) else 0,
        "served": worker.served_bytes if isinstance(worker, Server) else 0,
        "buffer": 2 * worker.end.bucket_bytes,
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, said)
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps({"seconds": seconds, "ranks": everyone}))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--serve", choices=("whole", "tensor-parallel"), default="whole")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, gib=0.01, rounds=1)
    arguments.shapes = shapes(arguments.gib)
    size = sum(2 * torch.Size(shape).numel() for shape in arguments.shapes.values())
    with TemporaryDirectory() as directory:
        fork = multiprocessing.get_context("fork")
        ranks = range(arguments.senders + arguments.receivers)
        processes = [fork.Process(target=rank_main, args=(rank, arguments, directory)) for rank in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = json.loads(Path(directory, "found.json").read_text())
    speed = {name: size / GIB / statistics.median(measured) for name, measured in found["seconds"].items()}
    receivers = found["ranks"][arguments.senders :]
    figures = {
        "weights_gib": round(size / GIB, 3),
        "received_of_served": [one["received"] / one["served"] for one in receivers],
        "broadcast_of_served": [size / one["served"] for one in receivers],
        "largest_buffer_mib": max(one["buffer"] for one in found["ranks"]) / 2**20,
        **{f"{name}_gib_per_s": round(value, 3) for name, value in speed.items()},
    }
    print(figures)
    ratio = round(speed["schedule"] / speed["broadcast"], 2)
    print(json.dumps({"benchmark": "weight_pools", "figures": figures, "baseline": "broadcast", "ratio": ratio}))


if __name__ == "__main__":
    main()
