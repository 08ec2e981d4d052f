"""The device of this process, and what a step costs on it."""

import ctypes
import resource
import sys

import torch

from tandem.types import Batch, StepMetrics

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 2**30


def best_device() -> torch.device:
    """The GPU if there is one. On a CPU, have glibc keep freed memory: page faults cost more than small models do."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    return torch.device("cpu")


def describe_resources(batch: Batch, seconds: float) -> StepMetrics:
    """Throughput over the whole step (prompt and response tokens); peak memory so far, of the GPU, else the process."""
    tokens = len(batch.prompt_ids) + len(batch.response_ids)
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "time/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/tokens_per_s_per_gpu": tokens / seconds / max(torch.cuda.device_count(), 1),
        "perf/peak_memory_gib": peak / 2**30,
    }
