"""A session: what an agent program asks -> the turns of one trajectory, as a tree of exact tokens.

    messages --the longest recorded conversation that they go on from--> Format.extend --> ids --the policy--> Node

Tokens are never made from messages that are recorded. Where an agent leaves what it was answered (a summary, a
sub-agent, an edited call, thinking left out) a new root begins: a further branch, and never an error.

Concurrency: each call is a task of the event loop that the engine works in; an agent may make several at once.

consumes:     what the agent asks, at any time until `close`
produces:     turns, each recorded when it is complete, whether or not the agent still waits for it
waits for:    the engine
unblocked by: the engine's completions; `close`
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.errors import TandemError, UserError
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import Line, Lines
from tandem.rollout.environment import Answer, ToolCall, ToolSchema
from tandem.rollout.fingerprints import fingerprint, fingerprints, reasonings, same_reasonings
from tandem.rollout.formats.base import Format
from tandem.rollout.record import Node, TokenTree
from tandem.types import Branch, Completion, IntArray, Message, Request, SamplingParams, Status


class SessionClosed(UserError):
    """The trajectory is over; nothing is answered any more."""


class ContextLengthExceeded(UserError):
    """What was asked leaves no room for an answer; programs may shorten it and ask again."""


class CutShort(TandemError):
    """The engine was stopped before the answer was complete."""


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """What answers."""

    chat_format: Format
    generate: Callable[[Request], AsyncIterator[Completion]]
    positions: Callable[[], float]
    """The most tokens of a row."""
    decode: Callable[[Sequence[int]], str]
    """The text of tokens, special ones spelled out."""
    pictures: ModelPictures | None = None
    """Of a model that sees pictures; those in the messages of calls are stored already."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds in a session."""

    sampling: SamplingParams
    """What holds where the agent does not choose; `max_tokens` bounds each answer."""
    agent_samples: bool = True
    """The agent chooses temperature, top-p, top-k and seed. Not in training, which is of one temperature."""
    response_tokens: float = math.inf
    """The most tokens of a branch behind what it was opened with."""
    calls: float = math.inf
    """How often the agent may ask."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One request of the agent; what is None is left to the session."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    may_call: bool = True
    """False: what looks like calls of tools is text."""
    n: int = 1
    """How many answers."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    top_logprobs: int = 0


@dataclass(eq=False, slots=True)
class SessionResponse:
    """One answer."""

    node: Node
    heard: Sequence[Message]
    """What was said since the answer that its node's parent has; without a parent, everything."""
    answer: Answer
    """The content is cut at a stop string."""
    request: Request
    reasonings: tuple[str, ...] = ()
    """Of each message of the whole conversation, this answer's last."""


@dataclass(eq=False, slots=True)
class AgentRequest:
    """A request of the agent with its answers."""

    asked: SessionRequest
    conversation: list[bytes]
    answers: asyncio.Future[list[SessionResponse]]
    """Waiting for it is cancelled without the answers being (`asyncio.shield`)."""
    waiting: int = 0
    """Connections on which the agent waits for the answers now."""
    taken: bool = False
    """The agent has the answers, for all that one can know."""

    def take(self) -> None:
        """The answers have reached the agent: they are trained on."""
        self.taken = True
        for said in self.answers.result():
            said.node.trained = True


@dataclass(slots=True)
class _Start:
    """What a call is answered on."""

    parent: Node | None
    line: Line
    heard: Sequence[Message]
    reasonings: tuple[str, ...]
    """Of all messages: the policy's as it thought, though the agent may have left them out."""

    @property
    def spent(self) -> int:
        """Tokens behind those that the line was opened with."""
        return len(self.line.ids) - len(self.parent.ancestry()[0].prompt_ids) if self.parent else 0


@dataclass(eq=False, slots=True)
class Session:
    """The calls of one trajectory."""

    policy: PolicyEndpoint
    rules: Rules
    seed: int
    """Of all that is drawn, but for calls that the agent gives seeds of its own."""
    reward: float | None = None
    """The agent's own word, where it gives one while the session lasts."""
    truncated: bool = False
    """A limit has kept the policy from saying all that it would have said."""
    out_of_calls: bool = False
    """That limit was the number of calls."""
    without_room: str | None = None
    """Why the first call that was to be answered left no room for it; None as soon as one was answered."""
    failure: Exception | None = None
    """Why the engine failed."""
    retried: int = 0
    """Calls that were answered from the record."""
    closed: bool = False
    asked: int = 0
    """How often the agent asked, retries aside."""
    _requests: list[AgentRequest] = field(default_factory=list[AgentRequest], init=False)
    _ends: dict[bytes, list[SessionResponse]] = field(default_factory=dict[bytes, list[SessionResponse]], init=False)
    """The answers by the fingerprint of the conversation up to them."""
    _named_calls: set[str] = field(default_factory=set[str], init=False)
    """The ids of the policy's calls of tools."""

    def call(self, asked: SessionRequest, retried: bool = False) -> AgentRequest:
        """Start to answer. A client that has `retried` what it asked before gets the answer that it has lost, also one
        that is still being made: nothing is sampled twice.

        Raises SessionClosed, ContextLengthExceeded, and UserError where the chat template refuses the messages.
        """
        if self.closed:
            raise SessionClosed("this session has ended: its key is of no use any more")
        conversation = fingerprints(asked.messages, asked.tools)
        if retried and (lost := self._lost(asked, conversation[-1])):
            self.retried += 1
            return lost
        if self.asked >= self.rules.calls:
            self.truncated = self.out_of_calls = True
            raise SessionClosed(f"this session's {self.rules.calls} calls are spent")
        request, start = self._request(asked, conversation)
        self.asked += 1
        self.without_room = None
        call = AgentRequest(
            asked, conversation, asyncio.ensure_future(self._answer(asked, conversation, request, start))
        )
        call.answers.add_done_callback(lambda _: self._note(call))
        self._requests.append(call)
        return call

    def refused(self, problem: str) -> ContextLengthExceeded:
        """What to raise of a call whose messages leave no room for an answer; the session notes that it was asked."""
        self.truncated = True
        if self.asked == 0:
            self.without_room = self.without_room or problem
        return ContextLengthExceeded(f"{problem}; shorten the messages")

    def close(self) -> None:
        """Answer nothing any more, and break off what is being answered. Safe to repeat."""
        self.closed = True
        for call in self._requests:
            call.answers.cancel()

    @property
    def answers(self) -> list[SessionResponse]:
        """Those that the agent has taken, in the order in which it asked for them. On others nothing depends."""
        done = [call.answers for call in self._requests if call.answers.done() and not call.answers.cancelled()]
        made = [said for answers in done if answers.exception() is None for said in answers.result()]
        return [said for said in made if said.node.trained]

    def branches(self) -> list[Branch]:
        """What is trained on; the line that ends in the last answer comes first. Empty where nothing was answered."""
        answers = self.answers
        return (
            TokenTree([said.node for said in answers]).branches(self.policy.decode, answers[-1].node) if answers else []
        )

    def messages(self) -> list[Message]:
        """What was said on the first branch, behind what it was opened with."""
        responses = self._trained_responses()
        told = [message for said in responses for message in (*said.heard, said.answer.message())]
        return told[len(self.opened_with()) :]

    def opened_with(self) -> Sequence[Message]:
        """The messages that opened the first branch."""
        responses = self._trained_responses()
        return responses[0].heard if responses else ()

    @property
    def last_turn(self) -> Status:
        """How the last answer ended; there has to be one."""
        return self.answers[-1].node.completion.status

    def _trained_responses(self) -> list[SessionResponse]:
        """The turns of the branch that ends in the last answer."""
        by_node = {id(said.node): said for said in self.answers}
        return [by_node[id(node)] for node in self.answers[-1].node.ancestry()] if by_node else []

    def _lost(self, asked: SessionRequest, conversation: bytes) -> AgentRequest | None:
        """What a retry repeats: the call whose answer nobody takes, else the last one."""
        same = [
            call for call in self._requests if call.conversation[-1] == conversation and _same_wish(call.asked, asked)
        ]
        untaken = [call for call in same if not call.taken and not call.waiting]
        return next(iter(untaken or same[::-1]), None)

    def _request(self, asked: SessionRequest, conversation: list[bytes]) -> tuple[Request, _Start]:
        start = self._start(asked, conversation)
        sampling = self._sampling(asked)
        ids, shown = start.line
        room = int(min(self.policy.positions() - len(ids), self.rules.response_tokens - start.spent))
        if room < 1:
            raise self.refused(
                f"the messages have {len(ids)} tokens, which leaves no room for an answer: the model has "
                f"{self.policy.positions()} positions, and a conversation may go on for {self.rules.response_tokens} "
                "tokens"
            )
        request = Request(
            ids,
            replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            self._seeds(asked),
            top_logprobs=asked.top_logprobs,
            keep=True,
            pictures=shown,
        )
        return request, start

    def _start(self, asked: SessionRequest, conversation: list[bytes]) -> _Start:
        """The longest recorded conversation that goes on, or a new one."""
        thought, lines = reasonings(asked.messages), Lines(self.policy.chat_format, self.policy.pictures)
        for length in range(len(asked.messages), 0, -1):
            ends = self._ends.get(conversation[length], ())
            ends = [said for said in ends if same_reasonings(thought[:length], said.reasonings)]
            if not ends:
                continue
            parent, heard = ends[-1].node, asked.messages[length:]
            line = lines.extend(Line(parent.ids, parent.pictures), heard, asked.tools) if heard else None
            if line is None:
                break
            parent.trained = True  # the agent has it, whatever became of the connection
            return _Start(parent, line, heard, (*ends[-1].reasonings, *thought[length:]))
        return _Start(None, lines.open(asked.messages, asked.tools), asked.messages, thought)

    def _sampling(self, asked: SessionRequest) -> SamplingParams:
        sampling = self.rules.sampling
        chosen = {"max_tokens": asked.max_tokens, "stop_strings": asked.stop}
        if self.rules.agent_samples:
            chosen |= {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        elif asked.max_tokens is not None:
            chosen["max_tokens"] = min(asked.max_tokens, sampling.max_tokens)
        return replace(sampling, **{name: value for name, value in chosen.items() if value is not None})

    def _seeds(self, asked: SessionRequest) -> tuple[int, ...]:
        """The first answer's is the session's own, as if there were no other."""
        if asked.seed is not None and self.rules.agent_samples:
            entropy: list[int] = [asked.seed & 0xFFFF_FFFF_FFFF_FFFF]
        elif self.asked == 0 and asked.n == 1:
            return (self.seed,)
        else:
            entropy = [self.seed, self.asked]
        return tuple(np.random.SeedSequence(entropy).generate_state(asked.n, "u8").tolist())

    async def _answer(
        self, asked: SessionRequest, conversation: list[bytes], request: Request, start: _Start
    ) -> list[SessionResponse]:
        completions = [completion async for completion in self.policy.generate(request)]
        if any(completion.status is Status.ABORTED for completion in completions):
            raise CutShort("the engine was stopped before the answer was complete")
        completions.sort(key=lambda completion: completion.sample)
        cut_by_us = asked.max_tokens is None or request.sampling.max_tokens < asked.max_tokens
        for completion in completions:
            self.truncated |= cut_by_us and completion.status is Status.TRUNCATED
        answers = [self._said(asked, request, start, completion) for completion in completions]
        for said in answers:
            message = said.answer.message()
            said.reasonings = (*start.reasonings, *reasonings([message]))
            self._ends.setdefault(fingerprint(message, after=conversation[-1]), []).append(said)
        return answers

    def _said(self, asked: SessionRequest, request: Request, start: _Start, completion: Completion) -> SessionResponse:
        author = "tool" if start.heard and start.heard[0]["role"] == "tool" else "user"
        shown = request.pictures
        node = Node(start.parent, request.token_ids, completion, author, trained=False, pictures=shown)
        return SessionResponse(node, start.heard, self._read(asked, request, completion.token_ids), request)

    def _read(self, asked: SessionRequest, request: Request, made: IntArray) -> Answer:
        """What the tokens say, as the agent gets it."""
        answer = self.policy.chat_format.parse(request.token_ids.tolist(), made.tolist(), asked.tools)
        if (answer.tool_calls or answer.broken) and not (asked.may_call and asked.tools):
            stops = request.sampling.stop_token_ids
            text = self.policy.decode([token for token in made.tolist() if token not in stops])
            answer = Answer(text)  # as it was written, with what it thought
        content = _cut(answer.content, request.sampling.stop_strings)
        return replace(answer, content=content, tool_calls=tuple(map(self._named, answer.tool_calls)))

    def _named(self, call: ToolCall) -> ToolCall:
        """With an id that no other call of the session has: nine letters and digits, which every template takes."""
        name, number = call.id, len(self._named_calls)
        while name in self._named_calls:
            name, number = f"call{number:05d}", number + 1
        self._named_calls.add(name)
        return replace(call, id=name)

    def _note(self, call: AgentRequest) -> None:
        """Forget a call that has failed; a retry asks anew."""
        error = None if call.answers.cancelled() else call.answers.exception()
        if call.answers.cancelled() or error is not None:
            self._requests.remove(call)
        if isinstance(error, Exception) and not isinstance(error, UserError | CutShort):
            self.failure = error


def _same_wish(one: SessionRequest, other: SessionRequest) -> bool:
    """They differ in nothing but how the conversation is laid out."""
    return replace(one, messages=(), tools=()) == replace(other, messages=(), tools=())


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
