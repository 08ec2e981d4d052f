"""A SteppedEngine of a few lines, to be killed and restarted: a process of it starts in no time.

Its one weight `w` is a number that every log-prob repeats, so that a token tells by which weights it was made.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tandem.types import Completion, Delta, Request, Status
from tandem.weights.base import Commit, Part

VOCABULARY = 50
MAX_RUNNING = 8
IN_ANSWERS = ("token", "version", "unversioned", "older", "length")
"""Faults that are in an answer itself."""


def expected_tokens(request: Request, sample: int) -> list[int]:
    """What the engine answers, by whatever weights."""
    return _tokens(request, sample, salt=0)


def _tokens(request: Request, sample: int, salt: int) -> list[int]:
    start, made = len(request.token_ids) - request.made, request.made
    seed = request.seeds[sample] + int(request.token_ids[:start].sum()) + salt
    return [(seed * 31 + place * 7) % VOCABULARY for place in range(made, made + request.sampling.max_tokens)]


class SteppedEngine:
    """A token a sample and step. When the file `fault` appears, one process takes it and fails as it says;
    where it begins with "always", all that run do.

    What a process answers is shifted by the number in the file `salt` beside it, if there is one when it starts.
    """

    def __init__(self, fault: Path, step_s: float = 0.002) -> None:
        self.max_tokens = 1000
        self.vocabulary = VOCABULARY
        self.max_running = MAX_RUNNING
        self._fault = fault
        salt = fault.with_name("salt")
        self._salt = int(salt.read_text()) if salt.exists() else 0
        self._step_s = step_s
        self._running: dict[int, tuple[Request, int, bool, list[int], list[float]]] = {}
        self._weight = self._loading = 0.0
        self._version = -1

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        if request.sampling.top_k == 13:
            raise ValueError("top_k 13 is bad luck")
        self._running[number] = (request, sample, streamed, [], [])

    def step(self) -> list[tuple[int, Completion | Delta]]:
        time.sleep(self._step_s)
        fault = self._take_fault()
        if fault in ("raise", "always raise"):
            raise RuntimeError(f"a fault of process {os.getpid()}")
        if fault in ("exit", "always exit"):
            os._exit(3)
        if fault == "bytes":
            for file in map(int, os.listdir("/proc/self/fd")):
                if file > 2 and os.readlink(f"/proc/self/fd/{file}").startswith("socket"):
                    os.write(file, b"\xff" * 100)
        outputs: list[tuple[int, Completion | Delta]] = []
        for number, (request, _, streamed, versions, logprobs) in list(self._running.items()):
            versions.append(self._version)
            logprobs.append(-self._weight)
            if len(versions) == request.sampling.max_tokens or fault == "short":
                outputs.append((number, self._end(number, Status.TRUNCATED)))
            elif fault in IN_ANSWERS:  # as if a stop token had ended the sample
                outputs.append((number, self._end(number, Status.COMPLETED, fault)))
            elif streamed:
                outputs.append((number, self._delta(number, None)))
        return outputs

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion | Delta]]:
        """With what comes of others meanwhile, as an engine gives it that goes on while it waits for their ends."""
        ended = [(number, self._end(number, Status.ABORTED)) for number in numbers if number in self._running]
        return ended + (self.step() if self._running else [])

    def load(self, part: Part) -> None:
        if isinstance(part, Commit):
            self._weight, self._version = self._loading, part.version
        else:
            memory: Any = part.memory  # type: ignore[union-attr]
            self._loading = float(np.fromfile(memory[0], np.float32, 1)[0])

    def sleep(self, weights: bool) -> None: ...

    def wake(self) -> None: ...

    def _delta(self, number: int, status: Status | None) -> Delta:
        """The last token of a sample, which each step gives one; without any where it is aborted."""
        request, sample, _, versions, logprobs = self._running[number]
        new = slice(len(versions) if status is Status.ABORTED else len(versions) - 1, len(versions))
        tokens = np.array(_tokens(request, sample, self._salt)[new], np.int32)
        return Delta(sample, tokens, np.array(logprobs[new], np.float32), np.array(versions[new], np.int32), status)

    def _end(self, number: int, status: Status, fault: str = "") -> Completion | Delta:
        request, sample, streamed, made, logprobs = self._running[number]
        if streamed and not fault:
            delta = self._delta(number, status)
            del self._running[number]
            return delta
        del self._running[number]
        tokens = np.array(_tokens(request, sample, self._salt)[: len(made)], np.int32)
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
            if not text.startswith("always"):
                self._fault.unlink()
        except FileNotFoundError:
            return ""
        return text


class DiaryEngine(SteppedEngine):
    """Takes the weights of any model: its log-probs tell their version alone. Answers differ in length.

    It writes its sleeps, wakes and versions into a file, and fails where it is asked for tokens while it sleeps.
    """

    def __init__(self, diary: Path) -> None:
        super().__init__(diary.with_name("fault"), step_s=0.001)
        self.max_running = 64
        self._diary = diary
        self._asleep = False

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        left = answer_length(request.seeds[sample], request.sampling.max_tokens + request.made) - request.made
        super().add(number, replace(request, sampling=replace(request.sampling, max_tokens=left)), sample, streamed)

    def step(self) -> list[tuple[int, Completion | Delta]]:
        if self._asleep:
            raise RuntimeError("it sleeps")
        return super().step()

    def _end(self, number: int, status: Status, fault: str = "") -> Completion | Delta:
        """As if a stop token had ended it."""
        return super()._end(number, Status.COMPLETED if status is Status.TRUNCATED else status, fault)

    def load(self, part: Part) -> None:
        if isinstance(part, Commit):
            self._weight, self._version = 1.0 + part.version, part.version
            write_diary(self._diary, f"engine serves {part.version}")

    def sleep(self, weights: bool) -> None:
        self._asleep = True
        if weights:
            self._weight = 0.0
        write_diary(self._diary, "engine sleeps")

    def wake(self) -> None:
        self._asleep = False
        write_diary(self._diary, "engine wakes")


def answer_length(seed: int, most: int) -> int:
    """Tokens that a DiaryEngine gives a seed: few, and to one in eight very many."""
    return most - seed % 50 if seed % 8 == 0 else 1 + seed % 20


def write_diary(diary: Path, entry: str) -> None:
    with diary.open("a") as file:
        file.write(f"{entry}\n")
