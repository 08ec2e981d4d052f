"""The device of this process, and what a step costs on it."""

import resource

import torch

from tandem.types import Batch, StepMetrics


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
