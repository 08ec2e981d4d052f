"""Agents that train by a base URL: prompt -> an agent program and a session for each sample -> trajectories.

    prompt --Session's key--> agent program --POST /v1/chat/completions--> Capture --> Session --> the engine
                                   '--its end, and its word--> Trajectory

Concurrency: the HTTP server, the sessions and what waits for the programs are tasks of the engine's event loop, which
may stand still for as long as the process trains: requests wait in their sockets until it goes on, and its clock, by
which all limits are counted, stands still too.

consumes:     prompts, at any time between `open` and `close`
produces:     the trajectories of a prompt, all together
waits for:    the programs, which wait for the engine
unblocked by: their end, their limit, `close`
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tandem.rollout.agents import Access, Agent, AgentsWord
from tandem.rollout.conversation_images import with_data_urls
from tandem.rollout.environment import EnvironmentFailed
from tandem.rollout.session import PolicyEndpoint, Rules, Session
from tandem.rollout.single_turn import DecodeAll
from tandem.rollout.together import together
from tandem.rollout.transcript import trajectory_of, trajectory_without_turns
from tandem.serving.capture import Capture, capture_app
from tandem.serving.limits import USUAL
from tandem.serving.server import Server, reserve
from tandem.serving.sessions import Sessions
from tandem.types import Prompt, SamplingParams, Status, Trajectory

_KEEP_ALIVE_S = 3600
"""Connections outlive the times in which the event loop stands still."""
_CONNECTIONS = 4
"""Of each program that runs."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What a program may take."""

    timeout_s: float
    """From its start to its end; then it is killed, and its environment has failed."""
    calls: float
    """How often it may ask the policy; then the trajectory is truncated."""
    at_once: int
    """Programs that run at once in this process; others wait."""
    retries: int
    """How often a failed one is run again, with a fresh session."""


class AgentConversations:
    """Runs the agents of one process. Made and used like `rollout.conversation.Conversations`, but opened before."""

    def __init__(self, agent: Agent, limits: AgentLimits, policy: PolicyEndpoint, decode: DecodeAll) -> None:
        self._agent = agent
        self._limits = limits
        self._policy = policy
        self._decode = decode
        self._slots = asyncio.Semaphore(limits.at_once)
        self._sessions = Sessions(limits.timeout_s + 1, most=2 * limits.at_once)  # the program's own limit comes first
        self._serving: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._base_url = ""

    async def open(self) -> None:
        """Listen on loopback. Raises UserError where that fails."""
        reserved = reserve("127.0.0.1", 0)
        capture = Capture(self._sessions, secrets.token_urlsafe(24), _nobody_begins, "policy")
        most = max(USUAL.connections, _CONNECTIONS * self._limits.at_once)
        limits = replace(USUAL, connections=most)
        server = Server(capture_app(capture), reserved, limits=limits, takes_signals=False, keep_alive_s=_KEEP_ALIVE_S)
        self._server, self._serving = server, asyncio.create_task(server.run_until_stopped())
        self._base_url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def answer(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams) -> list[Trajectory]:
        """A trajectory for each seed, in their order. `sampling.max_tokens` bounds each branch behind the messages that
        it was opened with; temperature, top-p and top-k are those of `sampling`, whatever the agent asks for.

        Raises what the engine raises. An agent that fails is run again, with a fresh session, as often as the limits
        say; then its trajectory is an ENVIRONMENT_ERROR.
        """
        return await together(self._hold(prompt, sample, seed, sampling) for sample, seed in enumerate(seeds))

    async def close(self) -> None:
        self._sessions.close()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _hold(self, prompt: Prompt, sample: int, seed: int, sampling: SamplingParams) -> Trajectory:
        """The trajectory of one sample, through as many runs of the agent as it takes."""
        start = time.perf_counter()
        failures = 0
        while True:
            rules = Rules(sampling, agent_samples=False, response_tokens=sampling.max_tokens, calls=self._limits.calls)
            session = Session(self._policy, rules, seed)
            held = await self._run(prompt, session)
            if not isinstance(held, EnvironmentFailed):
                break
            failures += 1
            if failures > self._limits.retries:
                held = trajectory_without_turns(prompt, sample, Status.ENVIRONMENT_ERROR, str(held))
                break
        if isinstance(held, AgentsWord):
            held = self._trajectory(prompt, sample, session, held)
        held.generation_s = time.perf_counter() - start
        held.numbers = {**held.numbers, "environment_retries": float(failures)}
        return held

    async def _run(self, prompt: Prompt, session: Session) -> AgentsWord | EnvironmentFailed:
        """Run the agent once. What it says in the end, or why it failed. Raises what the engine raised."""
        async with self._slots, self._key_of(session) as key:
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    row = with_data_urls(prompt.row, self._policy.pictures)
                    word = await self._agent.run(row, prompt.text, Access(self._base_url, key))
            except TimeoutError:
                word = EnvironmentFailed(f"the agent did not end within {self._limits.timeout_s:g} s")
            except EnvironmentFailed as error:
                word = error
        if session.failure is not None:
            raise session.failure
        if isinstance(word, EnvironmentFailed) and session.truncated:
            return AgentsWord()  # it was refused an answer: the limit is what ended it
        if isinstance(word, AgentsWord) and not session.answers and not session.truncated:
            return EnvironmentFailed("the agent ended without an answer of the policy; does it ask OPENAI_BASE_URL?")
        return word

    @asynccontextmanager
    async def _key_of(self, session: Session) -> AsyncIterator[str]:
        key = self._sessions.begin(session)
        try:
            yield key
        finally:
            self._sessions.end(key)

    def _trajectory(self, prompt: Prompt, sample: int, session: Session, word: AgentsWord) -> Trajectory:
        status = Status.TRUNCATED if session.truncated else Status.COMPLETED
        branches = session.branches()
        counted = {
            "calls": session.asked,
            "out_of_turns": int(session.out_of_calls),
            "without_room": int(session.without_room is not None),
            "retried_calls": session.retried,
        }
        numbers = {**counted, "branches": len(branches), **word.numbers}
        if not branches:
            unasked = trajectory_without_turns(prompt, sample, status, error="")
            return replace(unasked, error=session.without_room, reward=word.reward, numbers=numbers)
        made = trajectory_of(branches, prompt, sample, status, self._decode)
        made.opened_with, made.messages = tuple(session.opened_with()), tuple(session.messages())
        made.last_turn = session.last_turn
        made.ends_in = 0
        made.reward = session.reward if word.reward is None else word.reward
        made.numbers = numbers
        return made


def _nobody_begins() -> Session:
    raise AssertionError("only the trainer begins sessions here, and it does so itself")
