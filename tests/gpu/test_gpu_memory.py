"""Peak memory of the device, by phase of a step."""

from __future__ import annotations

import pytest
import torch

from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Arguments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GIB = 2**30


class Taker(Worker[None]):
    """Takes memory, and gives it back before it answers."""

    def generate(self, gib: float) -> None:
        torch.empty(int(gib * GIB), dtype=torch.uint8, device="cuda").zero_()
        torch.cuda.empty_cache()

    learn = publish = generate


def test_each_phase_has_its_own_peak() -> None:
    torch.zeros(1, device="cuda")
    host = WorkerHost()
    host.create("actor", Taker, None)
    peaks = []
    for gib in (0.5, 2.0, 1.0):  # the highest counts
        for method, more in (("generate", 0.0), ("learn", 1.0), ("publish", 0.25)):
            host.call("actor", method, Arguments((gib + more,), {}))
        peaks.append(host.workers["actor"].peak_memory())
    first, second, third = peaks
    assert second == third
    name = "perf/peak_memory_gib"
    for peak, highest in ((first, 0.5), (second, 2.0)):
        base = peak[f"{name}/generation"] - highest
        assert base >= 0
        assert peak[f"{name}/training"] - base == pytest.approx(highest + 1.0, abs=0.05)
        assert peak[f"{name}/publish"] - base == pytest.approx(highest + 0.25, abs=0.05)
        assert peak[name] == peak[f"{name}/training"]
