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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.config.conversation import ConversationConfig
from tandem.rollout.environment import Environment, EnvironmentFailed, Environments
from tandem.rollout.formats.base import Format
from tandem.rollout.record import Node, TokenTree
from tandem.types import Branch, Completion, IntArray, Message, Prompt, Request, SamplingParams, Status, Trajectory

Generate = Callable[[Request], AsyncIterator[Completion]]
DecodeAll = Callable[[list[IntArray]], list[str]]


@dataclass(slots=True)
class _Conversation:
    """One conversation on its way."""

    environment: Environment
    messages: list[Message]
    """All of them, those of the opening first."""
    opening: int
    """How many messages the opening has."""
    ids: IntArray
    """All tokens of the line that it is on now."""
    opened_with: IntArray
    """The tokens of the opening."""
    tree: TokenTree = field(default_factory=TokenTree)
    rewards: list[float] = field(default_factory=list[float])
    spent: int = 0
    """Tokens of all turns, and of what was said between them."""
    status: Status = Status.COMPLETED

    @property
    def turns(self) -> int:
        return len(self.tree.nodes)


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

    async def answer(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams) -> list[Trajectory]:
        """A trajectory for each seed, in their order. `sampling.max_tokens` bounds all turns of one together, with what
        is said between them.

        Raises what the engine raises. An environment that fails is replaced by a fresh one `environment_retries` times;
        then its trajectory is an ENVIRONMENT_ERROR.
        """
        opened = await asyncio.gather(*(self._open(prompt) for _ in seeds))
        asking, firsts = self._ask_first_turns(opened, seeds, sampling)
        holding = [
            asyncio.create_task(self._hold(prompt, sample, seed, sampling, opened[sample], firsts.get(sample)))
            for sample, seed in enumerate(seeds)
        ]
        try:
            return await asyncio.gather(*holding)
        finally:
            for task in (*asking, *holding):
                task.cancel()
            await asyncio.gather(*asking, *holding, return_exceptions=True)  # each closes its environment

    async def _open(self, prompt: Prompt) -> "_Conversation | EnvironmentFailed":
        """A conversation before the policy's first turn, or why its environment did not start."""
        environment = self._environments.make(prompt)
        try:
            messages = list(await environment.start(prompt))
        except Exception as error:  # noqa: BLE001 - the environment may raise anything
            return await _closed_after(environment, error)
        ids = np.array(self._format.open(messages, environment.tools), np.int32)
        return _Conversation(environment, messages, len(messages), ids, opened_with=ids)

    def _ask_first_turns(
        self, opened: Sequence["_Conversation | EnvironmentFailed"], seeds: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[asyncio.Task[None]], dict[int, asyncio.Future[Completion]]]:
        """Ask the engine once for all siblings that open with the same tokens: it computes these once. The tasks that
        ask, and the turn of each sample that there is to be."""
        alike: dict[bytes, list[int]] = {}
        for sample, conversation in enumerate(opened):
            if isinstance(conversation, _Conversation) and self._room(conversation, sampling) > 0:
                alike.setdefault(conversation.ids.tobytes(), []).append(sample)
        firsts = {sample: asyncio.get_running_loop().create_future() for some in alike.values() for sample in some}

        async def ask(samples: list[int]) -> None:
            conversation = opened[samples[0]]
            assert isinstance(conversation, _Conversation)
            limited = replace(sampling, max_tokens=self._room(conversation, sampling))
            request = Request(conversation.ids, limited, tuple(seeds[sample] for sample in samples))
            try:
                async for completion in self._generate(request):
                    firsts[samples[completion.sample]].set_result(completion)
            except Exception as error:  # noqa: BLE001 - raised where the turns are awaited
                for sample in samples:
                    if not firsts[sample].done():
                        firsts[sample].set_exception(error)

        return [asyncio.create_task(ask(samples)) for samples in alike.values()], firsts

    async def _hold(
        self,
        prompt: Prompt,
        sample: int,
        seed: int,
        sampling: SamplingParams,
        opened: "_Conversation | EnvironmentFailed",
        first: asyncio.Future[Completion] | None,
    ) -> Trajectory:
        """The trajectory of one sample, through as many environments as it takes."""
        start = time.perf_counter()
        failures = 0
        while True:
            held = opened if isinstance(opened, EnvironmentFailed) else await self._go_on(opened, seed, sampling, first)
            if not isinstance(held, EnvironmentFailed):
                break
            failures += 1
            if failures > self._config.environment_retries:
                return _failed(prompt, sample, held, failures)
            opened, first = await self._open(prompt), None
        conversation, reward = held
        trajectory = self._trajectory(prompt, sample, conversation, reward)
        trajectory.generation_s = time.perf_counter() - start
        trajectory.numbers = {**trajectory.numbers, "environment_retries": float(failures)}
        return trajectory

    async def _go_on(
        self, conversation: _Conversation, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> "tuple[_Conversation, float | None] | EnvironmentFailed":
        """Hold the conversation to its end; the reward of its environment for the whole, or why that failed."""
        environment = conversation.environment
        try:
            await self._take_turns(conversation, seed, sampling, first)
        except EnvironmentFailed as error:
            return await _closed_after(environment, error)
        except BaseException:
            await _closed_after(environment, EnvironmentFailed())
            raise
        try:
            closing = await environment.close()
        except Exception as error:  # noqa: BLE001 - the environment may raise anything
            return _as_failure(error)
        rewards = [*conversation.rewards, *([] if closing is None else [closing])]
        return conversation, sum(rewards) if rewards else None

    async def _take_turns(
        self, conversation: _Conversation, seed: int, sampling: SamplingParams, first: asyncio.Future[Completion] | None
    ) -> None:
        """Let the policy and the environment speak in turn until one of them is done, or a limit is reached."""
        parent: Node | None = None
        author = "user"
        while True:
            room = self._room(conversation, sampling)
            if room < 1 or conversation.turns == self._config.max_turns:
                conversation.status = Status.TRUNCATED
                return
            request = Request(conversation.ids, replace(sampling, max_tokens=room), (_turn_seed(seed, conversation),))
            completion = await (first if first is not None else self._one(request))
            first = None
            parent = Node(parent, conversation.ids, completion, author)
            conversation.status = completion.status
            messages = await self._step(conversation, parent)
            if not messages:
                return
            author = _author_of(messages)
            if not self._extend(conversation, messages):
                parent = None

    async def _step(self, conversation: _Conversation, node: Node) -> Sequence[Message]:
        """Take in a turn of the policy. What the environment says to it; nothing where the conversation is over."""
        environment, made = conversation.environment, node.completion.token_ids
        answer = self._format.parse(conversation.ids.tolist(), made.tolist(), environment.tools)
        conversation.tree.nodes.append(node)
        conversation.ids = node.ids
        conversation.spent += len(made)
        conversation.messages.append(answer.message())
        if node.completion.status is not Status.COMPLETED:
            return ()
        try:
            reply = await environment.step(answer)
        except Exception as error:
            raise _as_failure(error) from error
        if reply.reward is not None:
            node.reward = reply.reward
            conversation.rewards.append(reply.reward)
        return reply.messages

    def _extend(self, conversation: _Conversation, messages: Sequence[Message]) -> bool:
        """Append what the environment says to the tokens; False where they had to be made anew, as another branch."""
        conversation.messages += messages
        tools = conversation.environment.tools
        added = self._format.extend(conversation.ids.tolist(), messages, tools)
        if added is None:
            conversation.ids = np.array(self._format.open(conversation.messages, tools), np.int32)
            return False
        conversation.ids = np.concatenate((conversation.ids, np.array(added, np.int32)))
        conversation.spent += len(added)
        return True

    async def _one(self, request: Request) -> Completion:
        (completion,) = [completion async for completion in self._generate(request)]
        return completion

    def _room(self, conversation: _Conversation, sampling: SamplingParams) -> int:
        """Tokens that the next turn of the policy may have."""
        left = min(sampling.max_tokens - conversation.spent, self._positions() - len(conversation.ids))
        limit = self._config.max_turn_tokens
        return int(left if limit is None else min(left, limit))

    def _trajectory(self, prompt: Prompt, sample: int, conversation: _Conversation, reward: float | None) -> Trajectory:
        branches = conversation.tree.branches() or [_without_turns(conversation.opened_with)]
        first = branches[0]
        opening, text = self._decode([conversation.opened_with, first.response_ids])
        return Trajectory(
            prompt=replace(prompt, token_ids=first.prompt_ids, text=opening),
            sample=sample,
            response_ids=first.response_ids,
            loss_mask=first.loss_mask,
            rollout_logprobs=first.rollout_logprobs,
            versions=first.versions,
            text=text,
            status=conversation.status,
            turns=first.turns,
            experts=first.experts,
            messages=tuple(conversation.messages[conversation.opening :]),
            branches=tuple(branches[1:]),
            reward=reward,
            numbers=dict(conversation.environment.numbers),
        )


def _turn_seed(seed: int, conversation: _Conversation) -> int:
    """Of the next turn; the first one's is the trajectory's."""
    if conversation.turns == 0:
        return seed
    return int(np.random.SeedSequence([seed, conversation.turns]).generate_state(1, "u8")[0])


def _author_of(messages: Sequence[Message]) -> str:
    """Of tokens that the policy did not make."""
    return "tool" if messages[0]["role"] == "tool" else str(messages[0]["role"])


async def _closed_after(environment: Environment, error: Exception) -> EnvironmentFailed:
    """Close an environment whose conversation cannot go on; `error` is why, whatever closing raises."""
    with suppress(Exception):  # the first failure is the one to tell
        await environment.close()
    return _as_failure(error)


def _as_failure(error: Exception) -> EnvironmentFailed:
    if isinstance(error, EnvironmentFailed):
        return error
    failure = EnvironmentFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _failed(prompt: Prompt, sample: int, error: EnvironmentFailed, failures: int) -> Trajectory:
    """A trajectory that no loss sees: every environment that it was given has failed."""
    nothing = _without_turns(prompt.token_ids)
    return Trajectory(
        prompt=prompt,
        sample=sample,
        response_ids=nothing.response_ids,
        loss_mask=nothing.loss_mask,
        rollout_logprobs=nothing.rollout_logprobs,
        versions=nothing.versions,
        text="",
        status=Status.ENVIRONMENT_ERROR,
        numbers={"environment_retries": float(failures - 1)},
        error=str(error),
    )


def _without_turns(prompt_ids: IntArray) -> Branch:
    """The line of a conversation in which the policy has not spoken."""
    return Branch(
        prompt_ids,
        response_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
    )
