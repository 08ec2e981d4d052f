"""Engines in processes of their own, as one engine: routing, health, restart, weights.

    generate(), stream() --samples--> whichever is free    ~~add~~> replica_process.py <-> engine
       ^--------queue---------  completions and deltas, checked <~~outputs~~

consumes:     requests, at any time; weights at each `load_weights`
produces:     completions and deltas, into the queue of the call that each belongs to
waits for:    messages of the replicas, in one task while samples are pending; `load_weights`, `sleep`, `wake` and
              `abort` wait for the replicas themselves, and take in what comes meanwhile
unblocked by: the replicas; by a time-out when one gives no sign of life: it is killed, its samples go to others or wait
              for its successor, which gets the current weights before it gets samples
"""

import asyncio
import itertools
import select
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tandem.config.generation import ReplicatedGenerationConfig
from tandem.errors import EngineError, UserError, WorkerLost
from tandem.generation.base import EngineLimits
from tandem.generation.channel import ChannelClosed
from tandem.generation.dispatch_balance import EngineThroughput
from tandem.generation.pending import Results
from tandem.generation.replica import PINGS_PER_TIMEOUT, Fault, Replica, ReplicaSpec, ReplicaState, RoutedSample
from tandem.generation.routing import PrefixRouter
from tandem.pictures.marks import content_marked
from tandem.types import Completion, Delta, Request
from tandem.weights.base import Deliver, WeightSync

_AHEAD = 8
"""A replica has 1 / this of its slots in samples that it begins when others end, without waiting for the next ones."""


class ReplicatedEngine:
    """A GenerationEngine whose engines run in processes of their own, which may be lost and replaced."""

    def __init__(
        self,
        spec: ReplicaSpec,
        config: ReplicatedGenerationConfig,
        sync: WeightSync,
        tokenizer: Any = None,
        placeholder: int | None = None,
    ) -> None:
        """`placeholder`: as EngineLimits has it."""
        self._spec = spec
        self._config = config
        self._sync = sync
        self._limits = EngineLimits(
            positions=0, vocabulary=0, stop_strings=tokenizer is not None, max_running=0, placeholder=placeholder
        )
        self._version: int | None = None
        self._asleep = False
        self._publishing = False
        self._published: set[int] = set()
        self._numbers = itertools.count()
        self._waiting: OrderedDict[int, RoutedSample] = OrderedDict()
        """Samples that no replica has, oldest first."""
        self._failures = 0
        """Replicas lost since a sample last got an answer."""
        self._told: set[str] = set()
        """Kinds of faults that were told whole."""
        self._router = PrefixRouter()
        self._watching: asyncio.Task[None] | None = None
        self._replicas = [Replica.start(spec) for _ in range(config.replicas)]
        self._speeds = EngineThroughput(config.replicas)
        self._counted = time.monotonic()
        """Until when the replicas' work is counted."""

    @property
    def version(self) -> int:
        if self._version is None:
            raise EngineError("the generation engine has no weights yet: call load_weights first")
        return self._version

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def generate(self, request: Request) -> AsyncIterator[Completion]:
        return self._answer(request, streamed=False)

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        return self._answer(request, streamed=True)

    async def _answer(self, request: Request, streamed: bool) -> AsyncIterator[Any]:
        if self._asleep or self._version is None:
            raise EngineError("the generation engine is not ready: call load_weights, and wake after sleep")
        self._limits.check(request)
        results: Results = asyncio.Queue()
        pending = len(request.seeds)
        samples = {
            next(self._numbers): RoutedSample(request, index, streamed, results, self._version)
            for index in range(pending)
        }
        self._waiting |= samples
        self._assign()
        if self._watching is None or self._watching.done():
            self._counted = time.monotonic()
            self._watching = asyncio.create_task(self._watch())
        try:
            while pending:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                pending -= result.status is not None
                yield result
        finally:
            if pending:
                self._withdraw(samples)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        while any(replica.state is ReplicaState.STARTING for replica in self._replicas):
            self._pump(0.1)
        self._publish(version, self._replicas, partial(self._sync.publish, version, weights))
        self._version = version
        self._assign()

    def sleep(self) -> None:
        if self._pending():
            raise EngineError("the generation engine cannot sleep while requests run: await or abort them first")
        if not self._asleep and self._config.sleep != "never":
            self._call(self._replicas, "sleep", self._config.sleep == "weights")()
        self._asleep = True

    def wake(self) -> None:
        if self._asleep and self._config.sleep != "never":
            self._call(self._replicas, "wake")()
        self._asleep = False

    def abort(self) -> None:
        for _, sample in self._take_waiting():
            sample.end_without_tokens()
        for replica in self._replicas:
            replica.send("abort", list(replica.samples))
        while self._pending():
            self._pump(0.1)
            for _, sample in self._take_waiting():  # its replica was lost
                sample.end_without_tokens()

    def close(self) -> None:
        self._fail(EngineError("the generation engine was closed"))
        self._asleep = True
        for replica in self._replicas:
            replica.kill()
        self._replicas = []
        self._sync.close()

    # Samples.

    def _pending(self) -> bool:
        return bool(self._waiting) or any(replica.samples for replica in self._replicas)

    def _assign(self) -> None:
        """Give waiting samples to replicas, the siblings of a request to one while it has room."""
        serving = [replica for replica in self._replicas if replica.state is ReplicaState.SERVING]
        states = {replica.state for replica in self._replicas}
        if not self._publishing and states <= {ReplicaState.WITHOUT_WEIGHTS}:
            raise WorkerLost(f"generation: all engines were lost, and with them the weights of version {self.version}")
        if not serving:
            return
        while serving and self._waiting:
            samples, request = self._next_siblings()
            marked = content_marked(request.token_ids, request.pictures)
            replica = self._router.route(marked, {replica: self._end_of(replica) for replica in serving})
            samples = dict(itertools.islice(samples.items(), self._room(replica)))
            if not samples:
                serving.remove(replica)
                continue
            for number in samples:
                del self._waiting[number]
            replica.samples |= samples
            first = next(iter(samples.values()))
            indices = [sample.index for sample in samples.values()]
            replica.send("add", list(samples), request, indices, first.streamed)

    def _next_siblings(self) -> tuple[dict[int, RoutedSample], Request]:
        """Those that wait of the request that has waited longest."""
        first = next(iter(self._waiting.values()))
        siblings = itertools.takewhile(lambda item: item[1].results is first.results, self._waiting.items())
        return dict(siblings), first.request

    def _room(self, replica: Replica) -> int | None:
        """Samples that it may be given now: what it could not begin soon waits here for whichever is free first. None:
        as many as there are."""
        if self._config.replicas == 1:
            return None
        slots = self._limits.max_running // self._config.replicas
        return max(0, slots + slots // _AHEAD - len(replica.samples))

    def _end_of(self, replica: Replica) -> float:
        """When it will be through with what it has, compared with others."""
        return len(replica.samples) / self._speeds.relative()[self._replicas.index(replica)]

    def _withdraw(self, samples: Mapping[int, RoutedSample]) -> None:
        """Drop what is left of a request that nobody waits for any more."""
        for number in samples:
            self._waiting.pop(number, None)
        for replica in self._replicas:
            if gone := [number for number in samples if replica.samples.pop(number, None)]:
                replica.send("abort", gone)

    def _take_waiting(self) -> list[tuple[int, RoutedSample]]:
        taken = list(self._waiting.items())
        self._waiting.clear()
        return taken

    def _take_outputs(self, replica: Replica, outputs: list[tuple[int, Completion | Delta]]) -> None:
        for number, output in outputs:
            sample = replica.samples.get(number)
            if sample is None:  # nobody waits for it any more
                continue
            sample.take(output, self._limits.vocabulary, self._published)
            self._failures = 0
            if output.status is not None:
                del replica.samples[number]
                made = output.token_ids if isinstance(output, Completion) else sample.sent
                self._speeds.answered(self._replicas.index(replica), 1, len(made))
                if sample.request.keep:
                    row = content_marked(sample.row(output), sample.request.pictures)
                    self._router.note_end(row, replica)

    def _fail(self, error: Exception) -> None:
        """Every caller raises it."""
        lost = [sample for _, sample in self._take_waiting()]
        for replica in self._replicas:
            lost += replica.samples.values()
            replica.send("abort", list(replica.samples))
            replica.samples.clear()
        for results in {sample.results for sample in lost}:
            results.put_nowait(error)

    # Replicas.

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending():
            moved = asyncio.Event()
            watched = [replica.channel.fileno() for replica in self._replicas]
            for file in watched:
                loop.add_reader(file, moved.set)
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), self._config.health_timeout_s / PINGS_PER_TIMEOUT)
            finally:
                for file in watched:
                    loop.remove_reader(file)
            try:
                self._pump(0.0)
                self._assign()
            except Exception as error:  # noqa: BLE001 - every caller raises it
                self._fail(error)

    def _pump(self, timeout_s: float) -> None:
        """Take in messages of the replicas, replace those that are lost, bring restarted ones up to date."""
        sending = [replica.channel for replica in self._replicas if replica.channel.sending]
        select.select([replica.channel for replica in self._replicas], sending, [], timeout_s)
        self._count_work()
        for replica in list(self._replicas):
            try:
                for verb, *arguments in replica.receive():
                    self._take(replica, verb, arguments)
                replica.check_health(self._config)
            except UserError:
                raise
            except (ChannelClosed, TypeError, ValueError, AttributeError, IndexError) as error:
                self._replace(replica, error)
        if not self._publishing and self._version is not None:
            for replica in [replica for replica in self._replicas if replica.state is ReplicaState.WITHOUT_WEIGHTS]:
                self._publish(self._version, [replica], partial(self._sync.repeat, self._version))

    def _count_work(self) -> None:
        now = time.monotonic()
        for place, replica in enumerate(self._replicas):
            self._speeds.worked(place, len(replica.samples), now - self._counted)
        self._counted = now

    def _take(self, replica: Replica, verb: str, arguments: list[Any]) -> None:
        if verb == "outputs":
            self._take_outputs(replica, *arguments)
        elif verb == "answer":
            replica.answers_due.discard(*arguments)
        elif verb == "refused":
            number, error = arguments
            if sample := replica.samples.pop(number, None):
                sample.results.put_nowait(error)
        elif verb == "ready":
            positions, vocabulary, running = arguments
            running *= self._config.replicas
            self._limits = replace(self._limits, positions=positions, vocabulary=vocabulary, max_running=running)
            replica.state = ReplicaState.WITHOUT_WEIGHTS
        elif verb == "failed" and isinstance(arguments[0], UserError):
            raise arguments[0]
        elif verb == "failed":
            raise ChannelClosed(f"the engine raised:\n{arguments[0]}")
        elif verb != "pong":
            raise ChannelClosed(f"an unknown message: {verb!r}")

    def _replace(self, lost: Replica, error: Exception) -> None:
        """Kill a replica, start its successor, and let its samples wait for any replica."""
        fault = lost.end(error)
        self._failures += 1
        for sample in lost.samples.values():
            sample.restart()
        self._waiting = OrderedDict(sorted({**self._waiting, **lost.samples}.items()))  # numbers ascend with age
        lost.samples = {}
        place = self._replicas.index(lost)
        self._check_restarts(place, fault, follows=lost.follows)
        print(f"generation: an engine was lost and is started again: {self._shown(fault)}", file=sys.stderr, flush=True)
        self._told |= {fault.kind} if fault.kind else set()
        self._replicas[place] = Replica.start(self._spec, fault.kind)

    def _check_restarts(self, place: int, fault: Fault, follows: str | None) -> None:
        """Raises EngineError, and gives the replica up, where another one would be lost like this one and the one that
        it follows."""
        again = self._failures > 1 and fault.kind is not None and fault.kind == follows
        if not again and self._failures <= self._config.max_restarts:
            return
        del self._replicas[place]
        if again:
            raise EngineError(
                "generation: the engine failed in the same way as before it was started again, and is given up: "
                f"{self._shown(fault)}"
            )
        raise EngineError(
            f"generation: the engine was lost {self._failures} times in a row; lastly: {self._shown(fault)}"
        )

    def _shown(self, fault: Fault) -> str:
        """All of it, or where that was told before its last line."""
        if fault.kind not in self._told:
            return fault.reason
        return f"{fault.reason.splitlines()[-1]} (all of it was told when it happened first)"

    def _publish(self, version: int, replicas: Sequence[Replica], publish: Callable[[Deliver], bool | None]) -> None:
        targets = [replica for replica in replicas if replica.state is not ReplicaState.STARTING]
        for replica in targets:
            replica.state = ReplicaState.WITHOUT_WEIGHTS
        self._publishing = True
        self._published.add(version)
        try:
            published = publish(lambda part: self._call(targets, "load", part))
        finally:
            self._publishing = False
        for replica in targets if published is not False else ():
            replica.state = ReplicaState.SERVING

    def _call(self, replicas: Sequence[Replica], method: str, *arguments: Any) -> Callable[[], None]:
        """Call a method of the engines; the function that is returned waits for those that live."""
        number = next(self._numbers)
        called = [replica for replica in replicas if replica in self._replicas]
        for replica in called:
            replica.answers_due.add(number)
            replica.send("call", number, method, *arguments)

        def wait() -> None:
            while any(number in replica.answers_due for replica in called if replica in self._replicas):
                self._pump(0.1)

        return wait
