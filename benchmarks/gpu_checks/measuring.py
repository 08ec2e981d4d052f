"""Times, rates and memory of one device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_checks.figures import Bench

GIB = 2**30


def device_of(bench: Bench) -> torch.device:
    return torch.device("cpu" if bench.small else "cuda")


def dtype_of(bench: Bench) -> torch.dtype:
    """Of models."""
    return torch.float32 if bench.small else torch.bfloat16


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, run: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    """Median of `run`, after some that do not count."""
    taken: list[float] = []
    for _ in range(warm + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[warm:])


def copy_rate(bench: Bench) -> float:
    """Bytes/s that a large copy reads and writes."""
    device = device_of(bench)
    source = torch.ones(2**22 if bench.small else 2**29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(device, lambda: target.copy_(source), repeats=10)


def matmul_rate(bench: Bench) -> float:
    """FLOP/s of a large matrix product in the dtype of models."""
    device, size = device_of(bench), 512 if bench.small else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype_of(bench)) for _ in range(2))
    return 2 * size**3 / seconds(device, lambda: a @ b, repeats=10)


def let_go(device: torch.device) -> None:
    """Free what only cycles hold, as models of a variant before that are not used any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Allocated at most since `reset_peak`; None without a GPU, where torch does not count."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def kernels(device: torch.device, run: Callable[[], Any]) -> tuple[int, float]:
    """How many kernels `run` launches or replays, and their seconds; without a GPU, torch's operators."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as recorded:
        run()
        synchronize(device)
    events: list[Any] = list(recorded.key_averages())
    if cuda:
        events = [event for event in events if event.device_type.name == "CUDA" and event.self_device_time_total > 0]
        return sum(event.count for event in events), sum(event.self_device_time_total for event in events) / 1e6
    return sum(event.count for event in events), sum(event.self_cpu_time_total for event in events) / 1e6
