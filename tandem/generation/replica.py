"""One replica: the process with its engine, and the samples that it has been given."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from tandem.config.generation import ReplicatedGenerationConfig
from tandem.errors import EngineError
from tandem.generation.channel import PROCESS_ENDED, Channel, ChannelClosed
from tandem.generation.pending import PendingSample
from tandem.types import Completion, Delta, IntArray, Status, TopLogprobs

PINGS_PER_TIMEOUT = 4
"""A replica that is silent for this share of the health time-out is asked for a sign of life."""


class ReplicaSpec(NamedTuple):
    """What a replica's process makes: `module.function(*arguments)`, a SteppedEngine."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    defaults: Mapping[str, str] = {}
    """Environment variables, where they are not set already."""
    environment: Mapping[str, str] = {}


@dataclass(eq=False, slots=True)
class RoutedSample(PendingSample):
    """A sample that a replica generates, or another one after the first was lost."""

    version: int
    """The oldest policy version that the next token may have."""
    sent: list[int] = field(default_factory=list[int])
    """Tokens that the caller has had in deltas."""
    repeated: int = 0
    """How many tokens the present replica has given."""

    def restart(self) -> None:
        """Another replica begins the sample anew; the caller is spared what it has had."""
        self.repeated = 0

    def take(self, output: Completion | Delta, vocabulary: int, published: Container[int]) -> None:
        """Give the caller what is new in an output. Raises ChannelClosed where it is not sound."""
        if not self._is_sound(output, vocabulary, published):
            raise ChannelClosed(f"no sound answer to request {self.request}: {output}")
        if isinstance(output, Completion):
            self.results.put_nowait(output)
            return
        if len(output.versions):
            self.version = int(output.versions[-1])
        start, self.repeated = self.repeated, self.repeated + len(output.token_ids)
        known = self.sent[start : self.repeated]
        if output.token_ids[: len(known)].tolist() != known:
            self.results.put_nowait(
                EngineError("generate: the engine of a stream was lost, and another one continues it differently")
            )
            return
        self._deliver_new(output, len(known))

    def row(self, last: Completion | Delta) -> IntArray:
        """Prompt and response; `last` is what ended the sample."""
        made = self.sent if isinstance(last, Delta) else last.token_ids
        return np.concatenate((self.request.token_ids, np.asarray(made, dtype=self.request.token_ids.dtype)))

    def _deliver_new(self, delta: Delta, known: int) -> None:
        """The delta without its first tokens, which the caller has had."""
        new = slice(known, None)
        columns = (delta.token_ids[new], delta.logprobs[new], delta.versions[new])
        top = delta.top and TopLogprobs(delta.top.token_ids[new], delta.top.logprobs[new])
        prompt = None if self.sent else delta.prompt
        if len(columns[0]) or delta.status is not None:
            self.results.put_nowait(Delta(self.index, *columns, delta.status, top, prompt))
        self.sent += columns[0].tolist()

    def _is_sound(self, output: Completion | Delta, vocabulary: int, published: Container[int]) -> bool:
        tokens, versions, status = output.token_ids, output.versions, output.status
        count = self.repeated + len(tokens)
        return bool(
            isinstance(output, Delta if self.streamed else Completion)
            and output.sample == self.index
            and (isinstance(status, Status) or (self.streamed and status is None and len(tokens) > 0))
            and len(tokens) == len(output.logprobs) == len(versions)
            and count <= self.request.sampling.max_tokens
            and (count == self.request.sampling.max_tokens or status is not Status.TRUNCATED)
            and (count > 0 or status is Status.ABORTED)
            and ((tokens >= 0) & (tokens < vocabulary)).all()
            and (output.logprobs <= 1e-3).all()
            and all(version in published for version in set(versions.tolist()))
            and (versions >= self.version).all()
            and (np.diff(versions) >= 0).all()
            and self._has_logprobs(output, vocabulary)
        )

    def _has_logprobs(self, output: Completion | Delta, vocabulary: int) -> bool:
        """Whether log-probs of other tokens and of the prompt are there exactly where the request wants them."""
        count, prompt, request = len(output.token_ids), output.prompt, self.request
        first = isinstance(output, Completion) or self.repeated == 0
        if count == 0:  # aborted
            return True
        if (prompt is not None) != (request.prompt_logprobs and first):
            return False
        return _is_top(output.top, count, request.top_logprobs, vocabulary) and (
            prompt is None
            or (
                len(prompt.logprobs) == len(request.token_ids) - 1
                and _is_top(prompt.top, len(prompt.logprobs), request.top_logprobs, vocabulary)
            )
        )


def _is_top(top: TopLogprobs | None, tokens: int, wanted: int, vocabulary: int) -> bool:
    if top is None or wanted == 0:
        return top is None and (wanted == 0 or tokens == 0)
    shape = (tokens, min(wanted, vocabulary))
    ids = top.token_ids
    return bool(ids.shape == top.logprobs.shape == shape and ((ids >= 0) & (ids < vocabulary)).all())


class Silent(ChannelClosed):
    """A replica that lives gives no sign of life, or is not up in time."""


_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses, process ids and sizes, in which two reports of the same fault may differ."""
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of a process that was ended from outside: by who wants memory back, or a person."""


class Fault(NamedTuple):
    """What a replica was lost to."""

    reason: str
    kind: str | None
    """Of a fault of the engine itself: the reason without what differs by chance, the same for the same fault."""


class ReplicaState(Enum):
    STARTING = "starting"
    WITHOUT_WEIGHTS = "without weights"  # up, without the current weights
    SERVING = "serving"


@dataclass(eq=False)
class Replica:
    """A process and the channel to it; its group of processes ends with it."""

    process: subprocess.Popen[bytes]
    channel: Channel
    state: ReplicaState = ReplicaState.STARTING
    samples: dict[int, RoutedSample] = field(default_factory=dict[int, RoutedSample])
    """The samples that it is generating, by number."""
    answers_due: set[int] = field(default_factory=set[int])
    """Numbers of the calls that it has not answered."""
    heard: float = field(default_factory=time.monotonic)
    """When its last message came, or when it was started."""
    pinged: float | None = None
    """When it was asked for a sign of life, until it gives one."""
    follows: str | None = None
    """The kind of fault to which the replica before it was lost."""

    @classmethod
    def start(cls, spec: ReplicaSpec, follows: str | None = None) -> "Replica":
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem.generation.replica_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**spec.defaults, **os.environ, **spec.environment},
                start_new_session=True,  # a group of its own, to be killed with all that it starts
            )
        replica = cls(process, Channel(ours), follows=follows)
        replica.send(spec.module, spec.function, spec.arguments)
        return replica

    def send(self, *message: Any) -> None:
        self.channel.send(message)

    def receive(self) -> list[Any]:
        """Returns messages that have come. Raises ChannelClosed when the process has ended."""
        messages = self.channel.receive()
        if messages:
            self.heard, self.pinged = time.monotonic(), None
        return messages

    def check_health(self, config: ReplicatedGenerationConfig) -> None:
        """Ping a silent replica. Raises ChannelClosed when one says nothing for too long."""
        now = time.monotonic()
        if self.state is ReplicaState.STARTING:
            if now - self.heard > config.start_timeout_s:
                raise Silent(f"not up after {config.start_timeout_s} s")
        elif self.pinged is None:
            if now - self.heard > config.health_timeout_s / PINGS_PER_TIMEOUT:
                self.pinged = now
                self.send("ping")
        elif now - self.pinged > config.health_timeout_s:
            raise Silent(f"no sign of life in {config.health_timeout_s} s")

    def end(self, error: Exception) -> Fault:
        """End it after this error; what it was lost to."""
        status, reason = self.kill(), str(error)
        is_own = not isinstance(error, Silent)
        if reason == PROCESS_ENDED:
            is_own = status not in _ENDED_BY_OTHERS
            reason += f" with exit status {status}" if status >= 0 else f", by {signal.Signals(-status).name}"
        return Fault(reason, _NUMBER.sub("#", reason) if is_own else None)

    def kill(self) -> int:
        """End the process and everything that it started; its exit status, negative: the signal that ended it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.channel.close()
        return status
