"""vLLM as tests share it: it notes what it found in its cache, and can be kept from running ahead of a test."""

import time
from pathlib import Path
from typing import Any

from short_runs import STEPS

from tandem.generation.vllm import VllmEngine
from tandem.types import Completion, Delta, Request
from tandem.weights.base import Part


class WatchedVllm(VllmEngine):
    def __init__(self, counts: Path, short_runs: Path, *arguments: Any) -> None:
        """`counts`: gets a line for each sample that has ended, the tokens of its prompt that were in the cache.
        `short_runs`: a file that is there while runs are to be short."""
        super().__init__(*arguments)
        self._counts = counts
        self._short_runs = short_runs
        self._steps = 0
        """Since the last message."""

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        self._steps = 0
        super().add(number, request, sample, streamed)

    def load(self, part: Part) -> None:
        self._steps = 0
        super().load(part)

    def step(self) -> list[tuple[int, Completion | Delta]]:
        if self._steps >= STEPS and self._short_runs.exists():
            time.sleep(0.002)
            return []
        self._steps += 1
        return super().step()

    def _read(self, output: Any) -> tuple[int, Completion | Delta]:
        if output.finished:
            with self._counts.open("a") as file:
                file.write(f"{output.num_cached_tokens}\n")
        return super()._read(output)
