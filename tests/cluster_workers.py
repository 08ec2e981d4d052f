"""Workers for the tests of clusters, in a module that other processes can import."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.errors import UserError
from tandem.types import Batch, FloatArray, IntArray, StepMetrics, TokenColumns
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, OwnDispatch, Returns, register


def _one_word_each(mesh: Mesh, arguments: Arguments) -> Calls:
    words = arguments.args[0].split()
    return {rank: replace(arguments, args=(word,)) for rank, word in zip(range(mesh.size), words, strict=False)}


ONE_WORD_EACH = OwnDispatch(_one_word_each, lambda mesh, calls, answers: " ".join(answers.values()))
"""A user's own pair: ranks without a word are not called."""


@dataclass(frozen=True)
class ProbeSpec:
    grid: Mapping[str, int] | None = None
    scale: float = 1.0


class Probe(Worker[ProbeSpec | None]):
    def __init__(self, context: WorkerContext, spec: ProbeSpec | None) -> None:
        super().__init__(context, spec)
        self._grid = (spec and spec.grid) or {"data": context.size}
        self._scale = spec.scale if spec else 1.0
        self._kept: list[Any] = []

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"training": Mesh({"data": self.context.size}), "grid": Mesh(self._grid)}

    @register(Dispatch.ALL)
    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.context.name, self.context.rank, self.context.size, args, kwargs)

    @register(Dispatch.RANK_ZERO)
    def first(self) -> int:
        return self.context.rank

    @register(Dispatch.REPLICATED)
    def total(self) -> float:
        """Of the ranks' numbers, 1 …, over torch.distributed."""
        number = torch.tensor([self.context.rank + 1.0])
        if self.context.size > 1:
            torch.distributed.all_reduce(number)
        return number.item() * self._scale

    @register(ONE_WORD_EACH)
    def shout(self, word: str) -> str:
        return word.upper()

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_ROW)
    def squares(self, numbers: Sequence[int]) -> list[int]:
        return [number**2 for number in numbers]

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_ROW)
    def lengths(self, batch: Batch) -> IntArray:
        return np.diff(batch.response_offsets)

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def score(self, batch: Batch) -> FloatArray:
        """A number a response token that says which it is: of which row, and where in it."""
        rewards_T = batch.rewards[batch.row_of_token]
        return (rewards_T * self._scale + batch.response_ids / 1000).astype(np.float32)

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.SAME, Returns.PER_TOKEN))
    def learn(self, batch: Batch, factor: float) -> tuple[StepMetrics, FloatArray]:
        rows = torch.tensor([float(len(batch))])
        if self.context.size > 1:
            torch.distributed.all_reduce(rows)
        if factor < 0 and batch.rewards[0] == 3:
            raise ZeroDivisionError("of this step")
        time.sleep(max(0.0, factor - 2))
        return {"rows": rows.item()}, self.score(batch) * np.float32(factor)

    @register(Dispatch.DATA_PARALLEL, mesh="grid", returns=Returns.PER_ROW)
    def who(self, numbers: Sequence[int]) -> list[int]:
        """The rank whose answer was taken for each row."""
        return [self.context.rank] * len(numbers)

    @register(Dispatch.EACH, mesh="grid")
    def bill(self, entry: str, price: int) -> tuple[int, str, int]:
        """Who was asked, and what."""
        return (self.context.rank, entry, price)

    @register(Dispatch.ALL)
    def keep(self, array: IntArray) -> None:
        self._kept.append(array)

    @register(Dispatch.ALL)
    def kept(self) -> list[int]:
        return [int(array.sum()) for array in self._kept]

    @register(Dispatch.ALL)
    def numbers(self, count: int, start: int = 0) -> IntArray:
        return np.arange(start, start + count)

    @register(Dispatch.ALL)
    def wait_for(self, path: Path, then: Path | None = None) -> float:
        """Until `path` is there; makes `then`."""
        while not path.exists():
            time.sleep(0.005)
        if then:
            then.touch()
        return time.monotonic()

    @register(Dispatch.ALL)
    def neighbour(self, role: str) -> float:
        return self.context.colocated[role]._scale

    @register(Dispatch.ALL)
    def fail(self, rank: int, user: bool = False) -> None:
        """One rank raises; the others wait for it."""
        if self.context.rank == rank:
            raise UserError("model.path: no such directory") if user else ZeroDivisionError("of this rank")
        torch.distributed.barrier()

    @register(Dispatch.ALL)
    def unpicklable(self) -> Any:
        return threading.Lock()

    @register(Dispatch.ALL)
    def die(self, rank: int, status: int) -> None:
        """One rank's process ends, killed by signal `-status`, while the others are in a collective."""
        if self.context.rank == rank:
            print("my last words", flush=True)
            if status < 0:
                os.kill(os.getpid(), -status)
            os._exit(status)
        torch.distributed.barrier()

    @register(Dispatch.ALL)
    def hang(self) -> None:
        """Rank 0 never comes to the collective."""
        if self.context.rank == 0:
            time.sleep(3600)
        torch.distributed.barrier()

    @register(Dispatch.ALL)
    def say(self, text: str, error: str) -> None:
        print(text)
        print(error, file=sys.stderr)

    @register(Dispatch.ALL)
    def settings(self, name: str) -> tuple[str | None, int]:
        """Of the environment; threads of torch."""
        return os.environ.get(name), torch.get_num_threads()

    @register(Dispatch.ALL)
    def process(self) -> int:
        return os.getpid()


def ragged_batch(lengths: Sequence[int], prompt: int = 3) -> Batch:
    """Row `i` has reward `i`, response ids 0, 1, …, and is a group of its own."""
    rows, tokens = len(lengths), sum(lengths)
    return Batch(
        prompt_ids=np.zeros(rows * prompt, np.int32),
        prompt_offsets=np.arange(rows + 1) * prompt,
        response_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        response_offsets=np.r_[0, np.cumsum(lengths)],
        loss_mask=np.ones(tokens, np.bool_),
        versions=np.zeros(tokens, np.int32),
        groups=np.arange(rows, dtype=np.int32),
        trajectories=np.arange(rows, dtype=np.int32),
        prompts=np.arange(rows, dtype=np.int32),
        rewards=np.arange(rows, dtype=np.float32),
        scored=np.ones(rows, np.bool_),
        tokens=TokenColumns(rollout_logprobs=np.arange(tokens, dtype=np.float32)),
    )
