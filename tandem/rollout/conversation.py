"""Prompt -> trajectories of several turns: the policy speaks, an environment answers, until one of them is done.

    start --messages--> Format.open --ids--> generate --ids--> Format.parse --Answer--> step --messages--> Format.extend
                                                ^---------------------------------ids---------------------------'

Concurrency: all conversations of a process are tasks of one event loop.

consumes:     prompts, at any time
produces:     the trajectories of a prompt, all together
waits for:    the engine's completions, and environments; one that waits does not keep others from going on
unblocked by: engine and environments; calls of tools end at their limits
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tandem.config.conversation import ConversationConfig
from tandem.files import users_traceback
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import stored_aside
from tandem.rollout.environment import Environment, EnvironmentFailed, Environments, finite
from tandem.rollout.formats.base import Format
from tandem.rollout.single_turn import DecodeAll, Generate
from tandem.rollout.together import together
from tandem.rollout.transcript import Transcript, trajectory_without_turns
from tandem.types import Completion, Message, Prompt, Request, SamplingParams, Status, Trajectory


@dataclass(eq=False, slots=True)
class _Opened:
    """A conversation, and the world that it is held in."""

    environment: Environment
    transcript: Transcript
    out_of_turns: bool = False
    """Another turn of the policy was due, and `conversation.max_turns` was reached."""
    without_room: bool = False
    """What it was opened with leaves the policy no token of the engine's positions."""


class Conversations:
    """Holds the conversations of one process."""

    def __init__(
        self,
        config: ConversationConfig,
        environments: Environments,
        chat_format: Format,
        generate: Generate,
        decode: DecodeAll,
        positions: Callable[[], float],
        pictures: ModelPictures | None = None,
    ) -> None:
        """`positions`: the most tokens of a row that the engine takes, known once it has weights. `pictures`: of a
        model that sees them."""
        self._config = config
        self._environments = environments
        self._format = chat_format
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
        return await together(self._hold(prompt, sample, seed, sampling) for sample, seed in enumerate(seeds))

    async def _hold(self, prompt: Prompt, sample: int, seed: int, sampling: SamplingParams) -> Trajectory:
        """The trajectory of one sample, through as many environments as it takes."""
        start, failures = 0.0, 0
        while True:
            try:
                opened = await self._open(prompt)
                start = start or time.perf_counter()
                reward, numbers = await self._go_on(opened, seed, sampling)
                break
            except EnvironmentFailed as error:
                failures += 1
                if failures > self._config.environment_retries:
                    trajectory = trajectory_without_turns(prompt, sample, Status.ENVIRONMENT_ERROR, str(error))
                    trajectory.numbers = {"environment_retries": float(failures - 1)}
                    return trajectory
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

    async def _open(self, prompt: Prompt) -> _Opened:
        """A conversation before the policy's first turn. Raises EnvironmentFailed where its environment does not
        start."""
        try:
            environment = self._environments.make(prompt)
        except Exception as error:
            raise _as_failure(error) from error
        try:
            messages = await stored_aside(await environment.start(prompt), self._pictures)
        except BaseException as error:
            await _close(environment)
            if isinstance(error, Exception):
                raise _as_failure(error) from error
            raise
        try:
            return _Opened(environment, Transcript(self._format, messages, environment.tools, self._pictures))
        except BaseException:
            await _close(environment)
            raise

    async def _go_on(
        self, opened: _Opened, seed: int, sampling: SamplingParams
    ) -> tuple[float | None, dict[str, float]]:
        """Hold the conversation to its end. Returns the reward of its environment for the whole, and what it counted;
        raises EnvironmentFailed. The environment is closed either way."""
        try:
            await self._take_turns(opened, seed, sampling)
        except BaseException:
            await _close(opened.environment)
            raise
        try:
            reward = await opened.environment.close()
            numbers = {str(name): finite(number, name) for name, number in opened.environment.numbers.items()}
        except Exception as error:
            raise _as_failure(error) from error
        return None if reward is None else finite(reward, "the reward of close"), numbers

    async def _take_turns(self, opened: _Opened, seed: int, sampling: SamplingParams) -> None:
        """Let the policy and the environment speak in turn until one of them is done, or a limit is reached."""
        transcript = opened.transcript
        while True:
            tokens_left = self._tokens_left(transcript, sampling)
            opened.out_of_turns = transcript.turns == self._config.max_turns
            if tokens_left < 1 or opened.out_of_turns:
                transcript.status = Status.TRUNCATED
                opened.without_room = transcript.turns == 0
                return
            request = Request(
                transcript.ids,
                replace(sampling, max_tokens=tokens_left),
                (transcript.turn_seed(seed),),
                keep=transcript.turns + 1 < self._config.max_turns,  # another turn may follow
                pictures=transcript.shown,
            )
            (completion,) = [completion async for completion in self._generate(request)]
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

    def _tokens_left(self, transcript: Transcript, sampling: SamplingParams) -> int:
        """Tokens that the next turn of the policy may have."""
        left = min(sampling.max_tokens - transcript.spent, self._positions() - len(transcript.ids))
        limit = self._config.max_turn_tokens
        return int(left if limit is None else min(left, limit))


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
