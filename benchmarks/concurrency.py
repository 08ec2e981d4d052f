"""How busy conversations keep an engine while their tools take time, and how much they hold meanwhile.

    python benchmarks/concurrency.py [--conversations 128 512] [--slots 96] [--rounds 3] [--engines within beside]
                                     [--wall]

All conversations of a round are asked at once of a real rollout worker, in slices as the controller's, on a stepped
engine: each of its rows gains a token in a step of STEP_S + ROW_S x rows seconds; prompts cost nothing. A conversation
has 2 to 6 turns of 32 to 200 tokens (lognormal, median 64), and between two turns a call of 0.05 to 2 s (lognormal,
median 0.4). Nothing limits the calls that run at once. Everything else is as in training: chat template, parsing,
schemas, an instance of the tool for each trajectory, trees of tokens.

The clock is the CPU time of the loop's thread, and what it waits for, which costs no time: neighbours on the machine do
not count, and a round takes seconds. With `--wall` it is the wall's, and the tool blocks a thread for each call: on a
machine with nothing else to do.

    within   the engine's step blocks the process, as the native engine's: what the loop computes adds to the time
    beside   it passes by itself, as vLLM's: what the loop computes is hidden where it is quick enough

`of_possible` is the share of what the conversations' own work allows: the time of the same turns and calls on the same
engine where nothing else takes any, by the time that the round took. The former, `possible_s`, is a simulation that
knows nothing of the loop: a turn takes the first free slot at the beginning of a step, in the order of asking. No order
of turns can go below `bound_s`: all tokens at full slots, or the longest chain of a conversation's turns and calls.
`busy` is the share of the time in which the engine was in a step, `busy_possible` that of the simulation.

`most` was alive at any step: instances of the tool, threads, asyncio tasks; `after` is what is left of them after the
last round. `rss_mib` is the process's resident memory after each round. Each number of conversations runs in a process
of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import multiprocessing
import os
import random
import resource
import selectors
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from command_line import parse_arguments
from transformers import AutoTokenizer

from examples.letters import EOS, write_model
from examples.one_tool import CALL_TAGS, CHAT_TEMPLATE
from tandem.config.conversation import ConversationConfig
from tandem.config.generation import NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.files import load_named
from tandem.generation.base import EngineLimits
from tandem.types import Completion, Prompt, Request, Status, Trajectory
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import Ask, RolloutRequest, RolloutSpec, RolloutWorker

STEP_S, ROW_S = 0.020, 0.0001
SLICE_S = 0.05
"""As the controller's."""
SIBLINGS = 8
LOOK_EVERY = 5
"""Steps; looking costs a fraction of a millisecond."""
TOLD = " of the document that was looked for" * 6
"""What a call brings, about 200 tokens of one letter each."""


@dataclass(frozen=True)
class Turn:
    tokens: int
    call_s: float
    """Of the call that it ends with; 0 where it is the last one."""


def turns_of(conversation: int) -> list[Turn]:
    """What is said in a conversation, by its number."""
    draw = random.Random(conversation)
    count = draw.randint(2, 6)
    tokens = [round(_within(32, draw.lognormvariate(np.log(64), 0.7), 200)) for _ in range(count)]
    calls = [round(_within(0.05, draw.lognormvariate(np.log(0.4), 0.8), 2.0), 3) for _ in range(count - 1)]
    return [Turn(*turn) for turn in zip(tokens, [*calls, 0.0], strict=True)]


def _within(least: float, value: float, most: float) -> float:
    return min(most, max(least, value))


def plan(count: int) -> list[list[Turn]]:
    return [turns_of(conversation) for conversation in range(count)]


def step_s(rows: int) -> float:
    return STEP_S + ROW_S * rows


def possible(conversations: Sequence[Sequence[Turn]], slots: int) -> tuple[float, float]:
    """How long they take where only steps and calls take time, and how much of that are steps; seconds."""
    asked = [(0.0, number, 0) for number in range(len(conversations))]
    """(When, conversation, turn), a heap."""
    rows: list[list[int]] = []
    """[tokens left, conversation, turn]"""
    now = busy = 0.0
    while asked or rows:
        while asked and asked[0][0] <= now and len(rows) < slots:
            _, number, turn = heapq.heappop(asked)
            rows.append([conversations[number][turn].tokens, number, turn])
        if not rows:
            now = asked[0][0]
            continue
        now, busy = now + step_s(len(rows)), busy + step_s(len(rows))
        for row in rows:
            row[0] -= 1
        for _, number, turn in (row for row in rows if row[0] == 0):
            if turn + 1 < len(conversations[number]):
                heapq.heappush(asked, (now + conversations[number][turn].call_s, number, turn + 1))
        rows = [row for row in rows if row[0]]
    return now, busy


def bound_s(conversations: Sequence[Sequence[Turn]], slots: int) -> float:
    """What no order can go below."""
    tokens = sum(turn.tokens for turns in conversations for turn in turns)
    chains = (sum(turn.tokens * step_s(1) + turn.call_s for turn in turns) for turns in conversations)
    return max(tokens / slots * step_s(slots), *chains)


class BlockingLookup:
    """A tool that takes as long as it is asked to; counts its instances that are alive."""

    alive = 0

    def __init__(self) -> None:
        BlockingLookup.alive += 1

    def look_up(self, query: str) -> str:
        """Look something up.

        Args:
            query: Conversation, turn and the seconds that it takes.
        """
        time.sleep(float(query.split()[2]))
        return f"{query} {TOLD}"

    def close(self) -> None:
        BlockingLookup.alive -= 1


class Lookup(BlockingLookup):
    """The same without a thread."""

    async def look_up(self, query: str) -> str:
        """Look something up.

        Args:
            query: Conversation, turn and the seconds that it takes.
        """
        await asyncio.sleep(float(query.split()[2]))
        return f"{query} {TOLD}"

    async def close(self) -> None:
        super().close()


TOOL = f"{Path(__file__).resolve()}:"


class CpuClock(asyncio.SelectorEventLoop):
    """A loop whose time is the CPU time of its thread, and what would have been waited for."""

    def __init__(self) -> None:
        super().__init__(_NoWaiting(self))
        self.waited_s = 0.0

    def time(self) -> float:
        return time.thread_time() + self.waited_s


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, loop: CpuClock) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.waited_s += max(0.0, timeout or 0.0)
        return super().select(0)


@dataclass
class Live:
    """The most that was alive at a step."""

    tools: int = 0
    threads: int = 0
    tasks: int = 0

    def look(self, tool: type[BlockingLookup]) -> None:
        self.tools = max(self.tools, tool.alive)
        self.threads = max(self.threads, threading.active_count())
        self.tasks = max(self.tasks, len(asyncio.all_tasks()))


@dataclass
class Row:
    token_ids: Any
    left: int
    ended: asyncio.Future[Any]


@dataclass
class SteppedEngine:
    """A GenerationEngine whose steps take a known time, and whose samples say what their conversation's plan says."""

    tokenizer: Any
    slots: int
    blocks: bool
    now: Callable[[], float] = time.monotonic
    version: int = -1
    busy_s: float = 0.0
    live: Live = field(default_factory=Live)

    def __post_init__(self) -> None:
        self.limits = EngineLimits(positions=10**9, vocabulary=10**9, stop_strings=False, max_running=self.slots)
        self._call = self.tokenizer.convert_tokens_to_ids(CALL_TAGS[0])
        self._said: list[list[Any]] = []
        self._steps = 0
        self.tool = load_named(f"{TOOL}Lookup", "tool")  # of a module of its own, not of this program
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        loop, says = asyncio.get_running_loop(), [self._says(request, seed) for seed in request.seeds]
        rows = [Row(ids, len(ids), loop.create_future()) for ids in says]
        self._waiting.extend(rows)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        places = {row.ended: place for place, row in enumerate(rows)}
        pending = set(places)
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                ids = one.result()
                made = np.full(len(ids), self.version, np.int32)
                yield Completion(places[one], ids, np.full(len(ids), -1, np.float32), made, Status.COMPLETED)

    def say(self, conversations: Sequence[Sequence[Turn]]) -> None:
        """What the policy says from now on."""
        self._said = [
            [self._spelled(number, place, turn) for place, turn in enumerate(turns)]
            for number, turns in enumerate(conversations)
        ]

    def _spelled(self, conversation: int, place: int, turn: Turn) -> Any:
        """The ids of a turn; its call, which is at its end, names it."""
        called = f"{CALL_TAGS[0]}{conversation} {place} {turn.call_s}{CALL_TAGS[1]}" if turn.call_s else ""
        ids = self.tokenizer.encode(called + EOS)
        return np.array(self.tokenizer.encode("x") * (turn.tokens - len(ids)) + ids, np.int32)

    def _says(self, request: Request, seed: int) -> Any:
        """The turn after that which the last call in the prompt names. The seed of a first turn is its conversation."""
        calls = np.flatnonzero(request.token_ids == self._call)
        if not len(calls):
            return self._said[seed][0]
        words = self.tokenizer.decode(request.token_ids[calls[-1] + 1 :][:16]).split()
        return self._said[int(words[0])][int(words[1]) + 1]

    async def _step_until_idle(self) -> None:
        while self._waiting or self._rows:
            while self._waiting and len(self._rows) < self.slots:
                self._rows.append(self._waiting.popleft())
            if self._steps % LOOK_EVERY == 0:
                self.live.look(self.tool)
            self._steps += 1
            begun, loop = self.now(), asyncio.get_running_loop()
            if not self.blocks:
                await asyncio.sleep(step_s(len(self._rows)))
            elif isinstance(loop, CpuClock):
                loop.waited_s += step_s(len(self._rows))
            else:
                time.sleep(step_s(len(self._rows)))
            self.busy_s += self.now() - begun
            for row in self._rows:
                row.left -= 1
                if row.left == 0:
                    row.ended.set_result(row.token_ids)
            self._rows = [row for row in self._rows if row.left]
            await asyncio.sleep(0)

    def load_weights(self, version: int, weights: Iterable[Any] | None) -> None:
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class SteppedRollout(RolloutWorker):
    """With a SteppedEngine."""

    blocks = wall = True

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        if not self.wall:
            self._events.close()
            self._events = CpuClock()
            self.stepped.now = self._events.time

    def _native(self, model: ModelConfig, config: NativeGenerationConfig, tokenizer: Any, actor: Any) -> Any:
        self.stepped = SteppedEngine(tokenizer, config.max_running, self.blocks)
        return self.stepped


def make_worker(folder: Path, slots: int, blocks: bool, wall: bool) -> SteppedRollout:
    write_model(folder, 0, CHAT_TEMPLATE, CALL_TAGS)
    tool = f"{TOOL}BlockingLookup" if wall else f"{TOOL}Lookup"
    unlimited = {"limits": {"calls_at_once": 10**6}, "tools": [{"function": tool, "calls_at_once": 10**6}]}
    conversation = {"environment": unlimited, "calls": "examples.one_tool:read_calls"}
    spec = RolloutSpec(
        ModelConfig(path=folder),
        NativeGenerationConfig(max_running=slots, max_response_tokens=10**6),
        AutoTokenizer.from_pretrained(folder),
        ConversationConfig.model_validate(conversation),
    )
    kind = type("Rollout", (SteppedRollout,), {"blocks": blocks, "wall": wall})
    return kind(WorkerContext("rollout"), spec)


def hold(worker: SteppedRollout, count: int) -> list[Trajectory]:
    """A round of so many conversations, all asked at once, as the controller takes them."""
    asks = {
        first: Ask(RolloutRequest(Prompt(first, np.zeros(0, np.int32), "Look.", "", None), seeds), with_greedy=False)
        for first in range(0, count, SIBLINGS)
        for seeds in [tuple(range(first, min(first + SIBLINGS, count)))]
    }
    taken: list[Trajectory] = []
    done = worker.advance(asks, SLICE_S).done
    while len(taken) < count:
        taken += [one for _, siblings, _ in done for one in siblings]
        done = worker.advance({}, SLICE_S).done if len(taken) < count else []
    return taken


def check(taken: Sequence[Trajectory], conversations: Sequence[Sequence[Turn]]) -> None:
    """Each conversation has its turns, each in its length."""
    for one in taken:
        said = [turn.tokens for turn in one.turns if turn.author == "policy"]
        planned = conversations[one.prompt.index + one.sample]
        assert said == [turn.tokens for turn in planned] and one.status is Status.COMPLETED, (said, one.error)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure(count: int, slots: int, blocks: bool, wall: bool, rounds: int) -> dict[str, Any]:
    """Rounds of so many conversations, in this process."""
    torch.set_num_threads(1)
    conversations = plan(count)
    possible_s, possible_busy_s = possible(conversations, slots)
    walls, busy, rss, live = [], [], [], Live()
    with tempfile.TemporaryDirectory() as folder, closing(make_worker(Path(folder), slots, blocks, wall)) as worker:
        worker.publish(0)
        engine = worker.stepped
        engine.say(conversations)
        engine.live = live
        before, cpu = resident_mib(), time.process_time()
        for number in range(rounds):
            engine.busy_s, begun = 0.0, engine.now()
            check(hold(worker, count), conversations)
            walls.append(engine.now() - begun)
            busy.append(engine.busy_s / walls[-1])
            worker.publish(number + 1)
            rss.append(resident_mib())
        turns = sum(map(len, conversations))
        cpu_ms = 1000 * (time.process_time() - cpu) / rounds / turns
        after = Live()
        worker._events.run_until_complete(_look(after))
    wall = median(walls)
    return {
        "conversations": count,
        "turns": turns,
        "wall_s": round(wall, 2),
        "possible_s": round(possible_s, 2),
        "bound_s": round(bound_s(conversations, slots), 2),
        "of_possible": round(possible_s / wall, 3),
        "of_possible_each": [round(possible_s / one, 3) for one in walls],
        "busy": round(median(busy), 3),
        "busy_possible": round(possible_busy_s / possible_s, 3),
        "cpu_ms_a_turn": round(cpu_ms, 2),
        "most": vars(live),
        "after": vars(after),
        "rss_before_mib": round(before, 1),
        "rss_mib": [round(one, 1) for one in rss],
        "rss_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1),
    }


async def _look(live: Live) -> None:
    live.look(load_named(f"{TOOL}Lookup", "tool"))


def in_a_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def figures_of(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for engine in arguments.engines:
        for count in arguments.conversations:
            yield (
                f"{engine}_{count}",
                in_a_process(count, arguments.slots, engine == "within", arguments.wall, arguments.rounds),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=["within", "beside"], default=["within", "beside"])
    parser.add_argument("--wall", action="store_true")
    arguments = parse_arguments(parser, conversations=[8], slots=8, rounds=1)
    figures: dict[str, Any] = {}
    for name, found in figures_of(arguments):
        figures[name] = found
        print(name, json.dumps(found), flush=True)
    worst = min(found["of_possible"] for found in figures.values())
    print(json.dumps({"benchmark": "concurrency", "figures": figures, "baseline": "possible_s", "ratio": worst}))


if __name__ == "__main__":
    main()
