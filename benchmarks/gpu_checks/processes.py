"""What crosses processes: weights over CUDA IPC, and torch.distributed with one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch

from gpu_checks.figures import Bench
from gpu_checks.measuring import device_of, dtype_of
from gpu_checks.models import PolicyLoss, config_of, engine_of, model_of, skewed_rows
from tandem.batching.packing import micro_batches
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.models.loading import fill, load_empty
from tandem.training.layout import Sharded
from tandem.weights.base import BucketHalf, Commit
from tandem.weights.shared_memory import SharedMemorySync, attach
from tandem.workers.host import WorkerHost

_PATIENCE_S = 60.0


def ipc(bench: Bench) -> None:
    """Weights to another process: over CUDA IPC, with checksums and without; on a CPU through shared memory."""
    device, (count, rows) = device_of(bench), (8, 128) if bench.small else (160, 2048)
    weights = [(f"weight{i}", torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)) for i in range(count)]
    size = sum(weight.nbytes for _, weight in weights)
    wanted = {name: float(weight.double().sum()) for name, weight in weights}
    context = get_context("spawn")
    given: Queue[Any] = context.Queue()
    told: Queue[Any] = context.Queue()
    process = context.Process(target=_receive, args=(given, told, str(device)), daemon=True)
    process.start()
    assert told.get(timeout=_PATIENCE_S) == "ready"

    def deliver(message: BucketHalf | Commit) -> Callable[[], None]:
        given.put(message)
        return lambda: arrived.update(told.get(timeout=_PATIENCE_S))

    for case, checksum in (("without checksums", False), ("with checksums", True)):
        sync = SharedMemorySync(64 * 2**20, checksum=checksum)
        for turn in ("a first time", "again"):
            arrived: dict[str, float] = {}
            start = time.perf_counter()
            sync.publish(1, iter(weights), deliver)
            bench.report(
                "weights and their sums", size / (time.perf_counter() - start) / 1e9, "GB/s", f"{case}, {turn}"
            )
            assert arrived == wanted, "weights differ at the other end"
        sync.close()
    given.put(None)
    process.join(_PATIENCE_S)


def _receive(given: Queue[Any], told: Queue[Any], device: str) -> None:
    """The other process: it answers a bucket with the sum of each weight in it."""
    torch.zeros(1, device=device)
    told.put("ready")
    while (message := given.get()) is not None:
        sums = {} if isinstance(message, Commit) else {n: float(w.double().sum()) for n, w in attach(message)}
        told.put(sums)


def one_rank(bench: Bench) -> None:
    """A model in shards of one rank, over NCCL or on a CPU gloo, against the model in one piece: three steps."""
    host = WorkerHost(0, 1)
    host.join(f"file://{bench.work}/rendezvous", 0, _PATIENCE_S)
    config, dtype = config_of("tiny"), dtype_of(bench)
    batch = skewed_rows(512, 16, config.vocab_size)
    packed = micro_batches(batch, range(len(batch)), 200)
    whole, how = model_of(config, device_of(bench), dtype), FsdpTrainingConfig()
    whole.save_pretrained(bench.work / "one rank")
    stored = ModelConfig(path=bench.work / "one rank", dtype=str(dtype).removeprefix("torch."))
    sharded = load_empty(stored, value_head=False)
    layout = Sharded(sharded, how)
    fill(sharded, stored)
    found: dict[str, list[float]] = {}
    for name, engine in {
        "whole": engine_of(whole, how, lr=1e-3),
        "in shards": engine_of(sharded, how, lr=1e-3, layout=layout),
    }.items():
        found[name] = []
        for _ in range(3):
            found[name] += [engine.forward_backward(packed, PolicyLoss()).loss, engine.optimizer_step()["grad_norm"]]
        engine.offload()
        engine.onload()
        found[name].append(engine.forward_backward(packed, PolicyLoss()).loss)
    off = max(abs(one / other - 1) for one, other in zip(*found.values(), strict=True))
    bench.report("losses and gradient norms, off by", off, "", "of the model in one piece")
    assert np.allclose(*found.values(), rtol=0.05), found
    host.close()
