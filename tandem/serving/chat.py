"""A chat that is answered in a session: request -> Call -> one object, or the chunks of a stream.

A call of tools can be read when the answer is complete: a stream has its content in one chunk.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tandem.data.chat import TooLong, refuse_long
from tandem.errors import TandemError, UserError
from tandem.rollout.session import PolicyEndpoint, Session, SessionClosed, SessionRequest, SessionResponse
from tandem.serving.choice import Choice, ChoiceDelta, Token
from tandem.serving.errors import RequestError, body_of
from tandem.serving.parameters import ChatParameters
from tandem.serving.request_images import with_pictures_aside
from tandem.serving.requests import LEAST_TOP_P
from tandem.serving.shapes import ChatShape, Object
from tandem.serving.sse import send_events, while_connected
from tandem.types import Status


async def asked_of(params: ChatParameters, policy: PolicyEndpoint) -> SessionRequest:
    """Raises RequestError where a picture cannot be shown."""
    return SessionRequest(
        messages=await with_pictures_aside([message.plain() for message in params.messages], policy.pictures),
        tools=params.tools,
        may_call=params.tool_choice != "none",
        n=params.n,
        max_tokens=params.max_completion_tokens or params.max_tokens,
        temperature=params.temperature,
        top_p=None if params.top_p is None else max(params.top_p, LEAST_TOP_P),
        top_k=params.top_k,
        seed=params.seed,
        stop=None if params.stop is None else tuple(params.stop),
        top_logprobs=params.top_logprobs or 0,
    )


async def refuse_long_messages(asked: SessionRequest, session: Session) -> None:
    """Raises ContextLengthExceeded where what was said to the policy alone has far more tokens than there is room for:
    the session would tokenise all of it while everybody waits."""
    policy, texts = session.policy, list[str]()
    for message in asked.messages:
        if message["role"] != "assistant":  # templates may leave out what it thought
            parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
            texts += [part["text"] for part in parts if "text" in part]
    said, positions = "\n".join(texts), policy.positions()
    if len(said) <= positions:
        return

    def count(text: str) -> int:
        return len(policy.chat_format.open([{"role": "user", "content": text}], ()))

    try:
        await asyncio.to_thread(refuse_long, said, positions, count)
    except UserError:  # the template takes no such message; the session tells what it makes of these
        return
    except TooLong as error:
        raise session.refused(
            f"the messages have {error}, which leaves no room for an answer: the model has {positions} positions"
        ) from None


class ChatResponse(Response):
    """Answers in a session. The answer is recorded whether or not the client waits for it; it counts as taken where the
    client is there when it is sent."""

    def __init__(
        self,
        session: Session,
        params: ChatParameters,
        asked: SessionRequest,
        retried: bool = False,
        on_left: Callable[[], None] = lambda: None,
        on_failure: Callable[[TandemError], None] = lambda error: None,
    ) -> None:
        """`asked`: by `params`. `on_left`: the client left before it had all; `on_failure` is told why there is no
        answer. Raises UserError where the request cannot be answered."""
        super().__init__()
        if params.top_logprobs and not session.rules.agent_samples:
            raise RequestError(
                "top_logprobs: not while the policy is trained", param="top_logprobs", code="unsupported_parameter"
            )
        if params.chat_template_kwargs:
            raise RequestError(
                "chat_template_kwargs: not in a session; start the server with model.chat_template.arguments",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
        self._params = params
        self._spell = session.policy.decode
        self._call = session.call(asked, retried)
        self._shape = ChatShape(self._spell, params.logprobs)
        self._on_left = on_left
        self._on_failure = on_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = send_events(send, self._chunks()) if self._params.stream else self._whole(scope, receive, send)
        self._call.waiting += 1
        try:
            await while_connected(receive, sending)
        except (ClientDisconnect, OSError):
            self._on_left()
        finally:
            self._call.waiting -= 1

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = await self._answers()
        choices = [self._shape.said(self._piece(said), said.answer) for said in answers]
        told = {**self._identity(self._shape.whole), **self._of_prompt(answers), "choices": choices}
        told["usage"] = _usage(answers)
        await JSONResponse(told)(scope, receive, send)

    async def _chunks(self) -> AsyncGenerator[Object]:
        with_usage = self._params.stream_options.include_usage
        frame = self._identity(self._shape.chunk) | ({"usage": None} if with_usage else {})
        for index in range(self._params.n):
            yield {**frame, "choices": [self._shape.opening(index)]}
        try:
            answers = await self._answers()
        except TandemError as error:
            yield body_of(error)
            return
        for number, part in enumerate(self._parts(answers)):
            of_prompt = self._of_prompt(answers) if number == 0 else {}
            yield {**frame, **of_prompt, "choices": [part]}
        if with_usage:
            yield {**frame, "choices": [], "usage": _usage(answers)}

    def _of_prompt(self, answers: list[SessionResponse]) -> Object:
        wanted = self._params.return_token_ids
        return {"prompt_token_ids": answers[0].request.token_ids.tolist()} if wanted else {}

    def _parts(self, answers: list[SessionResponse]) -> Iterator[Object]:
        for said in answers:
            yield from self._shape.said_in_parts(self._piece(said), said.answer)

    async def _answers(self) -> list[SessionResponse]:
        """Waiting for them may be given up: they are made all the same."""
        await asyncio.wait([self._call.answers])
        if self._call.answers.cancelled():
            raise SessionClosed("this session has ended before the answer was complete")
        error = self._call.answers.exception()
        if isinstance(error, TandemError):
            self._on_failure(error)
        answers = self._call.answers.result()
        self._call.take()  # now: the client may act on the answer before sending it returns
        return answers

    def _piece(self, said: SessionResponse) -> ChoiceDelta:
        """The answer's tokens, with log-probs where they are wanted: these cost the text of each token."""
        made = said.node.completion
        if self._params.logprobs:
            choice = Choice(made.sample, said.request, self._spell)
            choice.push(made)
            piece = choice.take()
        else:
            piece = ChoiceDelta(made.sample, tokens=[Token(token, None, 0, []) for token in made.token_ids.tolist()])
        ended = "stop" if made.status is Status.COMPLETED else "length"
        piece.finish_reason = "tool_calls" if said.answer.tool_calls and ended == "stop" else ended
        return piece

    def _identity(self, kind: str) -> Object:
        return {
            "id": f"{self._shape.prefix}-{random.getrandbits(96):024x}",
            "object": kind,
            "created": int(time.time()),
            "model": self._params.model,
        }


def _usage(answers: list[SessionResponse]) -> dict[str, int]:
    prompt = len(answers[0].request.token_ids)
    made = sum(len(said.node.completion.token_ids) for said in answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
