"""A SteppedEngine of a few lines, to be killed and restarted: a process of it starts in no time.

Its one weight `w` is a number that every log-prob repeats, so that a token tells by which weights it was made.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.types import Completion, Request, Status
from tandem.weights.base import Commit, Part

VOCABULARY = 50
IN_ANSWERS = ("token", "version", "unversioned", "older", "length")
"""Faults that are in an answer itself."""


def expected_tokens(request: Request, sample: int) -> list[int]:
    """What the engine answers, by whatever weights."""
    seed = request.seeds[sample] + int(request.token_ids.sum())
    return [(seed * 31 + place * 7) % VOCABULARY for place in range(request.sampling.max_tokens)]


class SteppedEngine:
    """A token a sample and step. When the file `fault` appears, one process takes it and fails as it says."""

    def __init__(self, fault: Path, step_s: float = 0.002) -> None:
        self.max_tokens = 1000
        self.vocabulary = VOCABULARY
        self._fault = fault
        self._step_s = step_s
        self._running: dict[int, tuple[Request, int, list[int], list[float]]] = {}
        self._weight = self._loading = 0.0
        self._version = -1

    def add(self, number: int, request: Request, sample: int) -> None:
        self._running[number] = (request, sample, [], [])

    def step(self) -> list[tuple[int, Completion]]:
        time.sleep(self._step_s)
        fault = self._take_fault()
        if fault == "raise":
            raise RuntimeError("a fault")
        if fault == "bytes":
            for file in map(int, os.listdir("/proc/self/fd")):
                if file > 2 and os.readlink(f"/proc/self/fd/{file}").startswith("socket"):
                    os.write(file, b"\xff" * 100)
        ended: list[tuple[int, Completion]] = []
        for number, (request, _, versions, logprobs) in list(self._running.items()):
            versions.append(self._version)
            logprobs.append(-self._weight)
            if len(versions) == request.sampling.max_tokens or fault == "short":
                ended.append((number, self._end(number, Status.TRUNCATED)))
            elif fault in IN_ANSWERS:  # as if a stop token had ended the sample
                ended.append((number, self._end(number, Status.COMPLETED, fault)))
        return ended

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion]]:
        return [(number, self._end(number, Status.ABORTED)) for number in numbers if number in self._running]

    def load(self, part: Part) -> None:
        if isinstance(part, Commit):
            self._weight, self._version = self._loading, part.version
        else:
            memory: Any = part.memory  # type: ignore[union-attr]
            self._loading = float(np.fromfile(memory[0], np.float32, 1)[0])

    def sleep(self, weights: bool) -> None: ...

    def wake(self) -> None: ...

    def _end(self, number: int, status: Status, fault: str = "") -> Completion:
        request, sample, made, logprobs = self._running.pop(number)
        tokens = np.array(expected_tokens(request, sample)[: len(made)], np.int32)
        versions = np.array(made, np.int32)
        tokens[-1:] += VOCABULARY * (fault == "token")
        versions[-1:] += 1 * (fault == "version")  # one that was never published
        versions[-1:] = -1 if fault == "unversioned" else versions[-1:]  # as vLLM's are where it names none
        versions -= 2 * (fault == "older")  # one that was, before the request
        return Completion(
            sample, tokens, np.array(logprobs[: -1 if fault == "length" else None], np.float32), versions, status
        )

    def _take_fault(self) -> str:
        try:
            text = self._fault.read_text()
            self._fault.unlink()
        except FileNotFoundError:
            return ""
        return text
