"""Engines in processes of their own, as one engine: routing, health, restart, weights.

    generate() --samples--> least loaded replica ~~ask~~> host.py <-> engine
       ^-----queue---------  completions, checked <~~done~~

consumes:     requests, at any time; weights at each `load_weights`
produces:     completions, into the queue of the `generate` call that each belongs to
waits for:    messages of the replicas, in one task while samples are pending; `load_weights`, `sleep`, `wake` and
              `abort` wait for the replicas themselves, and take in what comes meanwhile
unblocked by: the replicas; by a time-out when one gives no sign of life: it is killed, its samples go to others or wait
              for its successor, which gets the current weights before it gets samples
"""

import asyncio
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tandem.config.generation import ServedGenerationConfig
from tandem.errors import EngineError, UserError, WorkerLost
from tandem.generation.base import Limits
from tandem.generation.channel import Channel, ChannelClosed
from tandem.types import Completion, IntArray, Request, Status
from tandem.weights.base import Deliver, WeightSync

_PINGS = 4  # in each health time-out
_AFFINITY_TOKENS = 32
_AFFINITY_ENTRIES = 65_536
_AFFINITY_SLACK = 1.5
"""A replica that knows the prompt's beginning gets it while its load is at most this times the least one's."""


class Start(NamedTuple):
    """What a replica's process makes: `module.function(*arguments)`, a SteppedEngine."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    defaults: Mapping[str, str] = {}
    """Environment variables, where they are not set already."""
    environment: Mapping[str, str] = {}


class State(Enum):
    STARTING = "starting"
    STALE = "stale"  # up, without the current weights
    SERVING = "serving"


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request, from `generate` until it is delivered."""

    request: Request
    index: int
    results: asyncio.Queue[Completion | Exception]
    version: int
    """The oldest one that its tokens may have."""


@dataclass(eq=False)
class Replica:
    """A process, and what it has been asked."""

    process: subprocess.Popen[bytes]
    channel: Channel
    state: State = State.STARTING
    samples: dict[int, Sample] = field(default_factory=dict[int, Sample])
    answers_due: set[int] = field(default_factory=set[int])
    heard: float = field(default_factory=time.monotonic)
    """When it last said something, or was started."""
    asked: float | None = None
    """When it was asked for a sign of life, until it gives one."""

    def kill(self) -> None:
        """With everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()


class ReplicatedEngine:
    """A GenerationEngine."""

    def __init__(self, start: Start, config: ServedGenerationConfig, sync: WeightSync, tokenizer: Any = None) -> None:
        self._start = start
        self._config = config
        self._sync = sync
        self._version: int | None = None
        self._limits = Limits(positions=0, vocabulary=0, stop_strings=tokenizer is not None)
        self._asleep = False
        self._publishing = False
        self._published: set[int] = set()
        self._numbers = itertools.count()
        self._waiting: dict[int, Sample] = {}
        """Samples that no replica has."""
        self._failures = 0
        self._seen: OrderedDict[int, Replica] = OrderedDict()
        """The replica that had a prompt's beginning, by its hash."""
        self._watching: asyncio.Task[None] | None = None
        self._replicas = [self._spawn() for _ in range(config.replicas)]

    @property
    def version(self) -> int:
        if self._version is None:
            raise EngineError("the generation engine has no weights yet: call load_weights first")
        return self._version

    @property
    def limits(self) -> Limits:
        return self._limits

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        if self._asleep or self._version is None:
            raise EngineError("the generation engine is not ready: call load_weights, and wake after sleep")
        self._limits.check(request)
        results: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        pending = len(request.seeds)
        samples = {next(self._numbers): Sample(request, i, results, self._version) for i in range(pending)}
        self._waiting |= samples
        self._assign()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            while pending:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                pending -= 1
                yield result
        finally:
            if pending:
                self._withdraw(samples)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        while any(replica.state is State.STARTING for replica in self._replicas):
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
            sample.results.put_nowait(_nothing(sample.index))
        for replica in self._replicas:
            self._send(replica, "abort", list(replica.samples))
        while self._pending():
            self._pump(0.1)
            for _, sample in self._take_waiting():  # its replica was lost
                sample.results.put_nowait(_nothing(sample.index))

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
        """Give waiting samples to replicas, the siblings of a request to one."""
        serving = [replica for replica in self._replicas if replica.state is State.SERVING]
        if not serving and not self._publishing and all(r.state is State.STALE for r in self._replicas):
            raise WorkerLost(f"generation: all engines were lost, and with them the weights of version {self.version}")
        if not serving:
            return
        requests: dict[int, dict[int, Sample]] = {}
        for number, sample in self._take_waiting():
            requests.setdefault(id(sample.request), {})[number] = sample
        for samples in requests.values():
            request = next(iter(samples.values())).request
            replica = self._route(request.token_ids, serving)
            replica.samples |= samples
            self._send(replica, "ask", list(samples), request, [sample.index for sample in samples.values()])

    def _route(self, token_ids: IntArray, serving: Sequence[Replica]) -> Replica:
        """The least loaded replica, or one not much busier that has computed the longest beginning of the prompt."""
        ends = range(_AFFINITY_TOKENS, len(token_ids) + 1, _AFFINITY_TOKENS)
        keys = [hash(token_ids[:end].tobytes()) for end in ends]
        chosen = min(serving, key=lambda replica: len(replica.samples))
        known = next((self._seen[key] for key in reversed(keys) if key in self._seen), chosen)
        if known in serving and len(known.samples) <= _AFFINITY_SLACK * len(chosen.samples) + 1:
            chosen = known
        for key in keys:
            self._seen[key] = chosen
            self._seen.move_to_end(key)
        while len(self._seen) > _AFFINITY_ENTRIES:
            self._seen.popitem(last=False)
        return chosen

    def _withdraw(self, samples: Mapping[int, Sample]) -> None:
        """Drop what is left of a request that nobody waits for any more."""
        for number in samples:
            self._waiting.pop(number, None)
        for replica in self._replicas:
            if gone := [number for number in samples if replica.samples.pop(number, None)]:
                self._send(replica, "drop", gone)

    def _take_waiting(self) -> list[tuple[int, Sample]]:
        taken = list(self._waiting.items())
        self._waiting.clear()
        return taken

    def _done(self, replica: Replica, ended: list[tuple[int, Completion]]) -> None:
        for number, completion in ended:
            sample = replica.samples.get(number)
            if sample is not None:  # else it was dropped
                self._check(completion, sample)
                del replica.samples[number]
                self._failures = 0
                sample.results.put_nowait(completion)

    def _check(self, completion: Completion, sample: Sample) -> None:
        """Raises on what a sound replica cannot say of the sample."""
        tokens, versions = completion.token_ids, completion.versions
        if not (
            completion.sample == sample.index
            and isinstance(completion.status, Status)
            and len(tokens) == len(completion.logprobs) == len(versions) <= sample.request.sampling.max_tokens
            and (len(tokens) == sample.request.sampling.max_tokens or completion.status is not Status.TRUNCATED)
            and (len(tokens) > 0 or completion.status is Status.ABORTED)
            and ((tokens >= 0) & (tokens < self._limits.vocabulary)).all()
            and (completion.logprobs <= 1e-3).all()
            and self._published.issuperset(versions.tolist())
            and (versions >= sample.version).all()
            and (np.diff(versions) >= 0).all()
        ):
            raise ChannelClosed(f"no sound answer to request {sample.request}: {completion}")

    def _fail(self, error: Exception) -> None:
        """Every caller raises it."""
        lost = [sample for _, sample in self._take_waiting()]
        for replica in self._replicas:
            lost += replica.samples.values()
            self._send(replica, "drop", list(replica.samples))
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
                    await asyncio.wait_for(moved.wait(), self._config.health_timeout_s / _PINGS)
            finally:
                for file in watched:
                    loop.remove_reader(file)
            try:
                self._pump(0.0)
                self._assign()
            except Exception as error:  # noqa: BLE001 - every caller raises it
                self._fail(error)

    def _pump(self, timeout_s: float) -> None:
        """Take in what replicas say, replace those that are lost, bring restarted ones up to date."""
        sending = [replica.channel for replica in self._replicas if replica.channel.sending]
        select.select([replica.channel for replica in self._replicas], sending, [], timeout_s)
        for replica in list(self._replicas):
            try:
                for verb, *arguments in replica.channel.receive():
                    replica.heard, replica.asked = time.monotonic(), None
                    self._take(replica, verb, arguments)
                self._check_health(replica)
            except UserError:
                raise
            except (ChannelClosed, TypeError, ValueError, AttributeError, IndexError) as error:
                self._replace(replica, str(error))
        if not self._publishing and self._version is not None:
            for replica in [replica for replica in self._replicas if replica.state is State.STALE]:
                self._publish(self._version, [replica], partial(self._sync.repeat, self._version))

    def _take(self, replica: Replica, verb: str, arguments: list[Any]) -> None:
        if verb == "done":
            self._done(replica, *arguments)
        elif verb == "answer":
            replica.answers_due.discard(*arguments)
        elif verb == "refused":
            number, reason = arguments
            if sample := replica.samples.pop(number, None):
                sample.results.put_nowait(EngineError(f"the engine refused a request:\n{reason}"))
        elif verb == "ready":
            positions, vocabulary = arguments
            self._limits = replace(self._limits, positions=positions, vocabulary=vocabulary)
            replica.state = State.STALE
        elif verb == "failed" and isinstance(arguments[0], UserError):
            raise arguments[0]
        elif verb == "failed":
            raise ChannelClosed(f"the engine raised:\n{arguments[0]}")
        elif verb != "pong":
            raise ChannelClosed(f"an unknown message: {verb!r}")

    def _check_health(self, replica: Replica) -> None:
        now, config = time.monotonic(), self._config
        if replica.state is State.STARTING:
            if now - replica.heard > config.start_timeout_s:
                raise ChannelClosed(f"not up after {config.start_timeout_s} s")
        elif replica.asked is None:
            if now - replica.heard > config.health_timeout_s / _PINGS:
                replica.asked = now
                replica.channel.send(("ping",))
        elif now - replica.asked > config.health_timeout_s:
            raise ChannelClosed(f"no sign of life in {config.health_timeout_s} s")

    def _replace(self, replica: Replica, reason: str) -> None:
        replica.kill()
        self._failures += 1
        self._waiting |= replica.samples
        replica.samples = {}
        place = self._replicas.index(replica)
        if self._failures > self._config.max_restarts:
            del self._replicas[place]
            raise EngineError(f"generation: the engine was lost {self._failures} times in a row; lastly: {reason}")
        print(f"generation: an engine was lost and is started again: {reason}", file=sys.stderr, flush=True)
        self._replicas[place] = self._spawn()

    def _spawn(self) -> Replica:
        ours, theirs = socket.socketpair()
        module, function, arguments, defaults, environment = self._start
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem.generation.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**defaults, **os.environ, **environment},
                start_new_session=True,  # a group of its own, to be killed with all that it starts
            )
        replica = Replica(process, Channel(ours))
        self._send(replica, module, function, arguments)
        return replica

    def _publish(self, version: int, replicas: Sequence[Replica], publish: Callable[[Deliver], bool | None]) -> None:
        targets = [replica for replica in replicas if replica.state is not State.STARTING]
        for replica in targets:
            replica.state = State.STALE
        self._publishing = True
        self._published.add(version)
        try:
            published = publish(lambda part: self._call(targets, "load", part))
        finally:
            self._publishing = False
        for replica in targets if published is not False else ():
            replica.state = State.SERVING

    def _call(self, replicas: Sequence[Replica], method: str, *arguments: Any) -> Callable[[], None]:
        """Call a method of the engines; the function that is returned waits for those that live."""
        number = next(self._numbers)
        asked = [replica for replica in replicas if replica in self._replicas]
        for replica in asked:
            replica.answers_due.add(number)
            self._send(replica, "call", number, method, *arguments)

        def wait() -> None:
            while any(number in replica.answers_due for replica in asked if replica in self._replicas):
                self._pump(0.1)

        return wait

    def _send(self, replica: Replica, *message: Any) -> None:
        replica.channel.send(message)


def _nothing(sample: int) -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(sample, empty, empty.astype(np.float32), empty, Status.ABORTED)
