"""Prompt -> trajectories of several turns: the policy speaks, an environment answers, until one of them is done.

    start --messages--> Format.open --ids--> generate --ids--> Format.parse --Answer--> step --messages--> Format.extend
                                                ^---------------------------------ids---------------------------'

Concurrency: all conversations of a process are tasks of one event loop.

consumes:     prompts, at any time
produces:     the trajectories of a prompt, all together
waits for:    the engine's completions, and environments; one that waits does not keep others from going on
unblocked by: engine and environments; calls of tools end at their limits
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tandem.config.conversation import ConversationConfig
from tandem.rollout.environment import Environment, EnvironmentFailed, Environments
from tandem.rollout.formats.base import Format
from tandem.rollout.single_turn import DecodeAll, Generate
from tandem.rollout.together import together
from tandem.rollout.transcript import Transcript, trajectory_without_turns
from tandem.types import Completion, Message, Prompt, Request, SamplingParams, Status, Trajectory


@dataclass(frozen=True, slots=True)
class _Opened:
    """A conversation, and the world that it is held in."""

    environment: Environment
    transcript: Transcript


class Conversations:
    """Holds the conversations of one process."""

    def __init__(
        self,
        config: ConversationConfig,
        environments: Environments,
        tokens: Format,
        generate: Generate,
        decode: DecodeAll,
        positions: Callable[[], float],
    ) -> None:
        """`positions`: the most tokens of a row that the engine takes, known once it has weights."""
        self._config = config
        self._environments = environments
        self._format = tokens
        self._generate = generate
        self._decode = decode
        self._positions = positions

    async def open(self) -> None:
        """Open what the environments share, such as connections to servers. Raises UserError."""
        await self._environments.open()

    async def close(self) -> None:
        """After the last conversation."""
        await self._environments.close()

    async def answer(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams) -> list[Trajectory]:
        """A trajectory for each seed, in their order. `sampling.max_tokens` bounds all turns of one together, with what
        is said between them.

        Raises what the engine raises. An environment that fails is replaced by a fresh one `environment_retries` times;
        then its trajectory is an ENVIRONMENT_ERROR.
        """
        opened = await asyncio.gather(*(self._open(prompt) for _ in seeds))
        asking, firsts = self._ask_first_turns(opened, seeds, sampling)
        try:
            return await together(
                self._hold(prompt, sample, seed, sampling, opened[sample], firsts.get(sample))
                for sample, seed in enumerate(seeds)
            )
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _open(self, prompt: Prompt) -> _Opened | EnvironmentFailed:
        """A conversation before the policy's first turn, or why its environment did not start."""
        environment = self._environments.make(prompt)
        try:
            messages = list(await environment.start(prompt))
        except Exception as error:  # noqa: BLE001 - the environment may raise anything
            return await _closed_after(environment, error)
        return _Opened(environment, Transcript(self._format, messages, environment.tools))

    def _ask_first_turns(
        self, opened: Sequence[_Opened | EnvironmentFailed], seeds: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[asyncio.Task[None]], dict[int, asyncio.Future[Completion]]]:
        """Ask the engine once for all siblings that open with the same tokens: it computes these once. The tasks that
        ask, and the turn of each sample that there is to be."""
        alike: dict[bytes, list[tuple[int, Transcript]]] = {}
        for sample, one in enumerate(opened):
            if isinstance(one, _Opened) and self._room(one.transcript, sampling) > 0:
                alike.setdefault(one.transcript.ids.tobytes(), []).append((sample, one.transcript))
        loop = asyncio.get_running_loop()
        firsts = {sample: loop.create_future() for group in alike.values() for sample, _ in group}

        async def ask(samples: Sequence[int], transcript: Transcript) -> None:
            limited = replace(sampling, max_tokens=self._room(transcript, sampling))
            own = tuple(seeds[sample] for sample in samples)
            request = Request(transcript.ids, limited, own, keep=self._may_go_on(transcript))
            try:
                async for completion in self._generate(request):
                    firsts[samples[completion.sample]].set_result(completion)
            except Exception as error:  # noqa: BLE001 - raised where the turns are awaited
                for sample in samples:
                    if not firsts[sample].done():
                        firsts[sample].set_exception(error)

        asks = [ask([sample for sample, _ in group], group[0][1]) for group in alike.values()]
        return [asyncio.create_task(one) for one in asks], firsts

    async def _hold(
        self,
        prompt: Prompt,
        sample: int,
        seed: int,
        sampling: SamplingParams,
        opened: _Opened | EnvironmentFailed,
        first: asyncio.Future[Completion] | None,
    ) -> Trajectory:
        """The trajectory of one sample, through as many environments as it takes."""
        start = time.perf_counter()
        failures = 0
        while True:
            failed = opened if isinstance(opened, EnvironmentFailed) else None
            if isinstance(opened, _Opened):
                try:
                    reward = await self._go_on(opened, seed, sampling, first)
                    break
                except EnvironmentFailed as error:
                    failed = error
            failures += 1
            if failures > self._config.environment_retries:
                trajectory = trajectory_without_turns(prompt, sample, Status.ENVIRONMENT_ERROR, str(failed))
                trajectory.numbers = {"environment_retries": float(failures - 1)}
                return trajectory
            opened, first = await self._open(prompt), None
        numbers = {**opened.environment.numbers, "environment_retries": float(failures)}
        trajectory = opened.transcript.trajectory(prompt, sample, self._decode, reward, numbers)
        trajectory.generation_s = time.perf_counter() - start
        return trajectory

    async def _go_on(
        self, opened: _Opened, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> float | None:
        """Hold the conversation to its end. Returns the reward of its environment for the whole; raises
        EnvironmentFailed. The environment is closed either way."""
        try:
            await self._take_turns(opened, seed, sampling, first)
        except BaseException:
            with suppress(Exception):  # the first failure is the one to tell
                await opened.environment.close()
            raise
        try:
            return await opened.environment.close()
        except Exception as error:
            raise _as_failure(error) from error

    async def _take_turns(
        self, opened: _Opened, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> None:
        """Let the policy and the environment speak in turn until one of them is done, or a limit is reached."""
        transcript = opened.transcript
        while True:
            room = self._room(transcript, sampling)
            if room < 1 or transcript.turns == self._config.max_turns:
                transcript.status = Status.TRUNCATED
                return
            if first is not None:
                completion, first = await first, None
            else:
                limited, seeds = replace(sampling, max_tokens=room), (transcript.turn_seed(seed),)
                request = Request(transcript.ids, limited, seeds, keep=self._may_go_on(transcript))
                completion = await self._one(request)
            messages = await self._step(opened, completion)
            if not messages:
                return
            transcript.tell(messages)

    async def _step(self, opened: _Opened, completion: Completion) -> Sequence[Message]:
        """Take in a turn of the policy. What the environment says to it; nothing where the conversation is over."""
        answer = opened.transcript.take(completion)
        if completion.status is not Status.COMPLETED:
            return ()
        try:
            reply = await opened.environment.step(answer)
        except Exception as error:
            raise _as_failure(error) from error
        if reply.reward is not None:
            opened.transcript.reward(reply.reward)
        return reply.messages

    async def _one(self, request: Request) -> Completion:
        (completion,) = [completion async for completion in self._generate(request)]
        return completion

    def _may_go_on(self, transcript: Transcript) -> bool:
        """Whether another turn of the policy may follow the next one."""
        return transcript.turns + 1 < self._config.max_turns

    def _room(self, transcript: Transcript, sampling: SamplingParams) -> int:
        """Tokens that the next turn of the policy may have."""
        left = min(sampling.max_tokens - transcript.spent, self._positions() - len(transcript.ids))
        limit = self._config.max_turn_tokens
        return int(left if limit is None else min(left, limit))


async def _closed_after(environment: Environment, error: Exception) -> EnvironmentFailed:
    """Close an environment that did not start; `error` is why, whatever closing raises."""
    with suppress(Exception):  # the first failure is the one to tell
        await environment.close()
    return _as_failure(error)


def _as_failure(error: Exception) -> EnvironmentFailed:
    if isinstance(error, EnvironmentFailed):
        return error
    failure = EnvironmentFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
