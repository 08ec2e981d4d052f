"""Where nothing but tokens and tools takes time, conversations keep an engine as busy as can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, load_file


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/concurrency.py, on a clock of which the CPU is no part."""
    module = load_file(ROOT / "benchmarks/concurrency.py")
    monkeypatch.setattr(module.CpuClock, "time", lambda loop: loop.waited_s)
    yield module


@pytest.mark.parametrize("within", [True, False])
def test_no_turn_waits_for_another_conversation_s_tool(benchmark: ModuleType, tmp_path: Path, within: bool) -> None:
    """As long as a simulation takes that knows nothing of the loop, but for the order of turns that go on in the same
    step; afterwards nothing is left of any conversation."""
    conversations, slots = benchmark.plan(64), 16
    possible_s, _ = benchmark.possible(conversations, slots)
    with closing(benchmark.make_worker(tmp_path, slots, within, wall=False)) as worker:
        worker.publish(0)
        engine = worker.stepped
        engine.say(conversations)
        begun = engine.now()
        benchmark.check(benchmark.hold(worker, len(conversations)), conversations)
        assert engine.now() - begun == pytest.approx(possible_s, rel=0.01)
        assert engine.live.tools == len(conversations)
        assert worker.room() == slots and engine.tool.alive == 0
