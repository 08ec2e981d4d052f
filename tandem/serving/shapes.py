"""Pieces of choices -> the objects that OpenAI publishes. Choices have `token_ids` besides."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from tandem.rollout.environment import Answer
from tandem.serving.choice import ChoiceDelta, Token
from tandem.serving.detokenizer import Decoder

Object = dict[str, Any]


class EndpointSchema(Protocol):
    """The objects of one endpoint."""

    prefix: str
    """An answer's `id` begins with it."""
    whole: str
    """The kind of a whole answer."""
    chunk: str
    """The kind of a chunk of a stream."""

    def choice(self, piece: ChoiceDelta) -> Object:
        """A whole choice."""
        ...

    def opening(self, index: int) -> Object | None:
        """What the stream of a choice begins with, before there are tokens."""
        ...

    def part(self, piece: ChoiceDelta) -> Object:
        """What is new in a choice, in a chunk of a stream."""
        ...


class TextShape:
    """/v1/completions: a chunk is a small answer."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, spell: Decoder, with_logprobs: bool, with_prompt_logprobs: bool = False) -> None:
        """`spell`: the text of tokens, special ones too."""
        self._spell = spell
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs

    def choice(self, piece: ChoiceDelta) -> Object:
        by_id = {"prompt_logprobs": [self._by_id(token) for token in piece.prompt]}
        return (by_id if self._with_prompt_logprobs else {}) | {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs([*piece.prompt, *piece.tokens]) if self._with_logprobs else None,
            "finish_reason": piece.finish_reason,
            "token_ids": [token.token_id for token in piece.tokens],
        }

    def opening(self, index: int) -> Object | None:
        return None

    def part(self, piece: ChoiceDelta) -> Object:
        return self.choice(piece)

    def _logprobs(self, tokens: Sequence[Token]) -> Object:
        return {
            "tokens": [self._spell([token.token_id]) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _by_id(self, token: Token) -> Object | None:
        """The most probable tokens and the token itself, as vLLM's server tells them; it gives ranks besides."""
        if token.logprob is None:
            return None
        return {
            str(token_id): {"logprob": logprob, "decoded_token": self._spell([token_id])}
            for token_id, logprob in [*token.top, (token.token_id, token.logprob)]
        }

    def _top(self, token: Token) -> Object | None:
        """The most probable tokens, and the token itself if it is none of them."""
        if token.logprob is None:
            return None
        pairs = [*token.top, (token.token_id, token.logprob)]
        named: Object = {}
        for token_id, logprob in pairs:
            named.setdefault(self._spell([token_id]), logprob)
        return named


class ChatShape:
    """/v1/chat/completions: a message, or the deltas of one."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, spell: Decoder, with_logprobs: bool) -> None:
        """`spell`: the text of tokens, special ones too."""
        self._spell = spell
        self._with_logprobs = with_logprobs

    def choice(self, piece: ChoiceDelta) -> Object:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def opening(self, index: int) -> Object | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, **self._rest(ChoiceDelta(index))}

    def part(self, piece: ChoiceDelta) -> Object:
        return {"index": piece.index, "delta": {"content": piece.text}, **self._rest(piece)}

    def said(self, piece: ChoiceDelta, answer: Answer) -> Object:
        """A whole choice whose text is read: what was thought and which tools are called stand apart."""
        content = None if answer.tool_calls and not answer.content else answer.content
        message = {"role": "assistant", "content": content, "refusal": None, **_read(answer)}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def said_in_parts(self, piece: ChoiceDelta, answer: Answer) -> Iterator[Object]:
        """The same behind the opening of a stream."""
        said = {"content": answer.content} if answer.content else {}
        delta = {**said, **_read(answer)}
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        whole = {"index": piece.index, "delta": delta, **self._rest(piece)}
        yield whole | {"finish_reason": None}
        yield {
            "index": piece.index,
            "delta": {},
            **self._rest(ChoiceDelta(piece.index, finish_reason=piece.finish_reason)),
        }

    def _rest(self, piece: ChoiceDelta) -> Object:
        return {
            "logprobs": self._logprobs(piece.tokens) if self._with_logprobs else None,
            "finish_reason": piece.finish_reason,
            "token_ids": [token.token_id for token in piece.tokens],
        }

    def _logprobs(self, tokens: Sequence[Token]) -> Object:
        content = [
            {
                **self._scored(token.token_id, token.logprob),
                "top_logprobs": [self._scored(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token_id: int, logprob: float | None) -> Object:
        name = self._spell([token_id])
        return {"token": name, "logprob": logprob, "bytes": _bytes_of(name)}


def _read(answer: Answer) -> Object:
    """The fields of a message beside its content."""
    fields: Object = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
    if answer.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in answer.tool_calls
        ]
    return fields


def _bytes_of(name: str) -> list[int] | None:
    """None: the token is a part of a letter, which text cannot show."""
    return None if "\ufffd" in name else list(name.encode())
