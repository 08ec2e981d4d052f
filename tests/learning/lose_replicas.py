"""Generates by real vLLM under load, and stops, kills or confuses a replica again and again. Prints what came of it.

    .venv-vllm/bin/python tests/learning/lose_replicas.py TIMES [health_timeout_s]

Every fault must be found within twice the health time-out; every sample must be whole, with the log-probs of a plain
forward pass by the weights of the versions that its tokens claim. Weights change between faults.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1] / "contract")]

from letters import letters, served_model
from test_generation import collect, reference_logprobs, request
from test_vllm import changed
from transformers import PreTrainedModel

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.generation.replica import Replica
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.start import start_engine
from tandem.types import Completion, Request

GARBAGE = ("bytes", "token", "version", "length")
FAULTS = ("stop", "kill", *GARBAGE)
MODELS = 5


def faulty_engine(fault: Path, *arguments: Any) -> Any:
    """The engine of a replica. When the file `fault` appears, one process takes it and answers as it says."""
    from tandem.generation.vllm import VllmEngine

    class Faulty(VllmEngine):
        def step(self) -> list[tuple[int, Any]]:
            ended = super().step()
            if ended and fault.exists():
                return [(number, spoil(done, fault)) for number, done in ended]
            return ended

    return Faulty(*arguments)


def spoil(done: Completion, fault: Path) -> Completion:
    kind = fault.read_text() if fault.exists() else ""
    fault.unlink(missing_ok=True)
    if kind == "bytes":
        os.write(int(sys.argv[1]), b"\xff" * 100)  # the channel's file, as replica_process.py was told
    return replace(
        done,
        token_ids=done.token_ids + 1000 * (kind == "token"),
        versions=done.versions + 1000 * (kind == "version"),
        logprobs=done.logprobs[: -1 if kind == "length" else None],
    )


class Load:
    """Requests that never stop, and what they were answered."""

    def __init__(self, engine: ReplicatedEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self.stop = False
        self.answers: list[tuple[Request, list[Completion]]] = []

    async def ask(self) -> None:
        while not self.stop:
            number = next(self._numbers)
            asked = request(number % 26, number // 26 % 26, seeds=(number, number + 1), max_tokens=60)
            self.answers.append((asked, await collect(self._engine, asked)))

    def check(self, models: Sequence[PreTrainedModel]) -> int:
        """Samples, each whole and true to its versions."""
        for asked, completions in self.answers:
            assert [completion.sample for completion in completions] == [0, 1]
            for completion in completions:
                assert len(completion.token_ids) == 60
                by_model = [reference_logprobs(model, asked, completion) for model in models]
                own = np.array([by_model[version % MODELS][at] for at, version in enumerate(completion.versions)])
                np.testing.assert_allclose(completion.logprobs, own, atol=1e-4, rtol=0)
        return 2 * len(self.answers)


async def strike(engine: ReplicatedEngine, kind: str, fault: Path) -> float:
    """Seconds until a replica is replaced for it."""
    before = list(engine._replicas)
    if kind in GARBAGE:
        fault.write_text(kind)
    else:
        victim = max(before, key=lambda replica: len(replica.samples))
        os.kill(victim.process.pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    start = time.monotonic()
    while engine._replicas == before:
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def lose(
    engine: ReplicatedEngine, models: Sequence[PreTrainedModel], fault: Path, times: int, timeout_s: float
) -> None:
    engine.load_weights(0, models[0].named_parameters())
    load = Load(engine)
    asking = [asyncio.create_task(load.ask()) for _ in range(6)]
    found: dict[str, list[float]] = {kind: [] for kind in FAULTS}
    for number in range(times):
        kind = FAULTS[number % len(FAULTS)]
        await asyncio.sleep(0.3)
        seconds = await strike(engine, kind, fault)
        found[kind].append(seconds)
        print(f"{number + 1}: {kind} found after {seconds:.2f} s", flush=True)
        assert seconds <= 2 * timeout_s
        engine.load_weights(number + 1, models[(number + 1) % MODELS].named_parameters())  # once all are up again
    load.stop = True
    await asyncio.gather(*asking)
    print(f"{load.check(models)} samples, all whole and true to their versions")
    for kind, seconds in found.items():
        print(f"{kind}: {len(seconds)} times, found after {max(seconds, default=0):.2f} s at most")


def start_faulty_engine(
    model: ModelConfig, models: Sequence[PreTrainedModel], fault: Path, timeout_s: float
) -> ReplicatedEngine:
    """vLLM on two replicas, as runs have it, but with engines that take faults."""
    config = VllmGenerationConfig(type="vllm", replicas=2, health_timeout_s=timeout_s)
    engine = start_engine(model, config, letters(), lambda: models[engine.version % MODELS].named_parameters())
    for replica in engine._replicas:
        replica.kill()
    sound = engine._spec
    engine._spec = sound._replace(
        module=Path(__file__).stem,
        function="faulty_engine",
        arguments=(fault, *sound.arguments),
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    engine._replicas = [Replica.start(engine._spec) for _ in engine._replicas]
    return engine


def main() -> None:
    times, timeout_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    directory = Path(tempfile.mkdtemp())
    served_model().save_pretrained(directory)
    letters().save_pretrained(directory)
    models = [changed(version) for version in range(MODELS)]
    with closing(start_faulty_engine(ModelConfig(path=directory), models, directory / "fault", timeout_s)) as engine:
        start = time.monotonic()
        asyncio.run(lose(engine, models, directory / "fault", times, timeout_s))
        print(f"done in {time.monotonic() - start:.0f} s, the time-out was {timeout_s:g} s")


if __name__ == "__main__":
    main()
