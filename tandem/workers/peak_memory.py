"""How much of its device a process has seen in use, by phase of a step."""

import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from tandem.types import StepMetrics

_METRIC = "perf/peak_memory_gib"
_PHASES = {
    "advance": "generation",
    "generate": "generation",
    "generate_for_eval": "generation",
    "logprobs": "training",
    "token_statistics": "training",
    "values": "training",
    "learn": "training",
    "publish": "publish",
    "send_weights": "publish",
}
"""The phase of a step, by the worker's method that runs. Other methods count towards the whole alone."""


def cuda_in_use() -> Any:
    """`torch.cuda`, where this process computes on a GPU; else None. Who has not imported torch does not."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class PeakMemory:
    """The highest use of this process's GPU so far: what the process had reserved at its peak, plus what other
    processes held there at the end of each call (engines of their own reserve what they need before they answer).

    Without a GPU: the peak memory of the process itself.
    """

    def __init__(self) -> None:
        self._peaks_gib: dict[str, float] = {}

    @contextmanager
    def measured(self, method: str) -> Generator[None]:
        """Measures while the method of a worker runs."""
        if (cuda := cuda_in_use()) is not None:
            cuda.reset_peak_memory_stats()
        yield
        if (cuda := cuda_in_use()) is not None:
            free, total = cuda.mem_get_info()
            given_back = cuda.max_memory_reserved() - cuda.memory_reserved()
            phase = _PHASES.get(method, "")
            self._peaks_gib[phase] = max(self._peaks_gib.get(phase, 0.0), (total - free + given_back) / 2**30)

    def metrics(self) -> StepMetrics:
        """`perf/peak_memory_gib`, and by phase `perf/peak_memory_gib/<phase>`; so far."""
        if not self._peaks_gib:
            return {_METRIC: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        phases = {f"{_METRIC}/{phase}": peak for phase, peak in self._peaks_gib.items() if phase}
        return {_METRIC: max(self._peaks_gib.values()), **phases}
