"""A taskset of verifiers: sums, with a tool that adds. `verifiers_server.py addition` plays it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Addition"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.1)
    async def a_number(self, trace: vf.Trace) -> float:
        return float(any(letter.isdigit() for letter in trace.last_reply or ""))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Addition(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        for number in range(1000):
            a, b = random.Random(number).choices(range(10, 50), k=2)
            yield Sum(SumData(idx=number, prompt=f"What is {a} + {b}?", answer=a + b), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset[vf.SharedToolsetConfig]]:
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()  # verifiers starts the tool's server as `python -m addition`
