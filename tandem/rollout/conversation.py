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
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tandem.config.conversation import ConversationConfig
from tandem.files import users_traceback
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.environment import Environment, EnvironmentFailed, Environments, finite
from tandem.rollout.formats.base import Format
from tandem.rollout.pictures import stored_aside
from tandem.rollout.single_turn import DecodeAll, Generate
from tandem.rollout.together import ended, together
from tandem.rollout.transcript import Transcript, trajectory_without_turns
from tandem.types import Completion, Message, Picture, Prompt, Request, SamplingParams, Status, Trajectory

_LATE_S = 1.0
"""For siblings to open after the first of them."""


@dataclass(eq=False, slots=True)
class _Opened:
    """A conversation, and the world that it is held in."""

    environment: Environment
    transcript: Transcript
    out_of_turns: bool = False
    """Another turn of the policy was due, and `conversation.max_turns` was reached."""
    without_room: bool = False
    """What it was opened with leaves the policy no token of the engine's positions."""
    held: bool = False
    """Who holds it closes the environment."""


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
        pictures: ModelPictures | None = None,
    ) -> None:
        """`positions`: the most tokens of a row that the engine takes, known once it has weights. `pictures`: of a
        model that sees them."""
        self._config = config
        self._environments = environments
        self._format = tokens
        self._generate = generate
        self._decode = decode
        self._positions = positions
        self._pictures = pictures

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
        opening = [asyncio.create_task(self._open(prompt)) for _ in seeds]
        asking: list[asyncio.Task[None]] = []
        try:
            await _all_but_late(opening)
            in_time = {sample: one.result() for sample, one in enumerate(opening) if one.done()}
            asking, firsts = self._ask_first_turns(in_time, seeds, sampling)
            return await together(
                self._hold(prompt, sample, seed, sampling, opening[sample], firsts.get(sample))
                for sample, seed in enumerate(seeds)
            )
        finally:
            await ended([*asking, *opening])
            for one in opening:
                if not one.cancelled() and one.exception() is None:
                    await _close_unheld(one.result())

    async def _open(self, prompt: Prompt) -> _Opened | EnvironmentFailed:
        """A conversation before the policy's first turn, or why its environment did not start."""
        try:
            environment = self._environments.make(prompt)
        except Exception as error:  # noqa: BLE001 - the environment may raise anything
            return _as_failure(error)
        try:
            messages = await stored_aside(await environment.start(prompt), self._pictures)
        except BaseException as error:
            await _close(environment)
            if isinstance(error, Exception):
                return _as_failure(error)
            raise
        try:
            return _Opened(environment, Transcript(self._format, messages, environment.tools, self._pictures))
        except BaseException:
            await _close(environment)
            raise

    def _ask_first_turns(
        self, opened: Mapping[int, _Opened | EnvironmentFailed], seeds: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[asyncio.Task[None]], dict[int, asyncio.Future[Completion]]]:
        """Ask the engine once for all siblings that open with the same tokens: it computes these once. The tasks that
        ask, and the turn of each sample that there is to be. `opened`: by sample, those that have opened by now."""
        alike: dict[tuple[bytes, tuple[Picture, ...]], list[tuple[int, Transcript]]] = {}
        for sample, one in opened.items():
            if isinstance(one, _Opened) and self._room(one.transcript, sampling) > 0:
                same = (one.transcript.ids.tobytes(), one.transcript.shown)
                alike.setdefault(same, []).append((sample, one.transcript))
        loop = asyncio.get_running_loop()
        firsts = {sample: loop.create_future() for group in alike.values() for sample, _ in group}

        async def ask(samples: Sequence[int], transcript: Transcript) -> None:
            limited = replace(sampling, max_tokens=self._room(transcript, sampling))
            request = self._request(transcript, limited, [seeds[sample] for sample in samples])
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
        opening: Awaitable[_Opened | EnvironmentFailed],
        first: asyncio.Future[Completion] | None,
    ) -> Trajectory:
        """The trajectory of one sample, through as many environments as it takes."""
        start = time.perf_counter()
        failures, opened = 0, await opening
        while True:
            failed = opened if isinstance(opened, EnvironmentFailed) else None
            if isinstance(opened, _Opened):
                try:
                    reward, numbers = await self._go_on(opened, seed, sampling, first)
                    break
                except EnvironmentFailed as error:
                    failed = error
            failures += 1
            if failures > self._config.environment_retries:
                trajectory = trajectory_without_turns(prompt, sample, Status.ENVIRONMENT_ERROR, str(failed))
                trajectory.numbers = {"environment_retries": float(failures - 1)}
                return trajectory
            opened, first = await self._open(prompt), None
        counted = {
            "out_of_turns": float(opened.out_of_turns),
            "without_room": float(opened.without_room),
            "environment_retries": float(failures),
        }
        numbers = {**numbers, **counted}
        trajectory = opened.transcript.trajectory(prompt, sample, self._decode, reward, numbers)
        if opened.without_room:
            length = f"it opens with {len(opened.transcript.ids):,} tokens"
            trajectory.error = f"{length}, and the engine has {self._positions():,} positions for them and the answer"
        trajectory.generation_s = time.perf_counter() - start
        return trajectory

    async def _go_on(
        self, opened: _Opened, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> tuple[float | None, dict[str, float]]:
        """Hold the conversation to its end. Returns the reward of its environment for the whole, and what it counted;
        raises EnvironmentFailed. The environment is closed either way."""
        opened.held = True
        try:
            await self._take_turns(opened, seed, sampling, first)
        except BaseException:
            await _close(opened.environment)
            raise
        try:
            reward = await opened.environment.close()
            numbers = {str(name): finite(number, name) for name, number in opened.environment.numbers.items()}
        except Exception as error:
            raise _as_failure(error) from error
        return None if reward is None else finite(reward, "the reward of close"), numbers

    async def _take_turns(
        self, opened: _Opened, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> None:
        """Let the policy and the environment speak in turn until one of them is done, or a limit is reached."""
        transcript = opened.transcript
        while True:
            room = self._room(transcript, sampling)
            opened.out_of_turns = transcript.turns == self._config.max_turns
            if room < 1 or opened.out_of_turns:
                transcript.status = Status.TRUNCATED
                opened.without_room = transcript.turns == 0
                return
            if first is not None:
                completion, first = await first, None
            else:
                limited = replace(sampling, max_tokens=room)
                completion = await self._one(self._request(transcript, limited, [transcript.turn_seed(seed)]))
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
            messages = await stored_aside(reply.messages, self._pictures)
        except Exception as error:
            raise _as_failure(error) from error
        if reply.reward is not None:
            opened.transcript.reward(finite(reply.reward, "the reward of a turn"))
        return messages

    def _request(self, transcript: Transcript, sampling: SamplingParams, seeds: Sequence[int]) -> Request:
        keep = self._may_go_on(transcript)
        return Request(transcript.ids, sampling, tuple(seeds), keep=keep, pictures=transcript.shown)

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


async def _all_but_late(opening: Sequence[asyncio.Task[_Opened | EnvironmentFailed]]) -> None:
    """Wait until they have opened, but not for long after the first: one may wait for what its siblings hold."""
    _, late = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
    if late:
        await asyncio.wait(late, timeout=_LATE_S)


async def _close_unheld(opened: _Opened | EnvironmentFailed) -> None:
    """Close an environment that opened when the conversations of its prompt were already over."""
    if isinstance(opened, _Opened) and not opened.held:
        await _close(opened.environment)


async def _close(environment: Environment) -> None:
    """After a failure, which is the one to tell."""
    with suppress(Exception):
        await environment.close()


def _as_failure(error: Exception) -> EnvironmentFailed:
    if isinstance(error, EnvironmentFailed):
        return error
    if isinstance(error, BadPicture):
        return EnvironmentFailed(f"the environment shows what is no picture: {error}")
    failure = EnvironmentFailed(users_traceback(error, os.path.dirname(__file__)))
    failure.__cause__ = error
    return failure
