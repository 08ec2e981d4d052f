"""Pieces of choices -> the objects that OpenAI publishes. Choices have `token_ids` besides."""

from collections.abc import Sequence
from typing import Any, Protocol

from tandem.serving.base import Answerer
from tandem.serving.choice import Piece, Token

Object = dict[str, Any]


class Shape(Protocol):
    """The objects of one endpoint."""

    prefix: str
    """An answer's `id` begins with it."""
    whole: str
    """The kind of a whole answer."""
    chunk: str
    """The kind of a chunk of a stream."""

    def choice(self, piece: Piece) -> Object:
        """A whole choice."""
        ...

    def opening(self, index: int) -> Object | None:
        """What the stream of a choice begins with, before there are tokens."""
        ...

    def part(self, piece: Piece) -> Object:
        """What is new in a choice, in a chunk of a stream."""
        ...


class TextShape:
    """/v1/completions: a chunk is a small answer."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, answerer: Answerer, with_logprobs: bool) -> None:
        self._answerer = answerer
        self._with_logprobs = with_logprobs

    def choice(self, piece: Piece) -> Object:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs([*piece.prompt, *piece.tokens]) if self._with_logprobs else None,
            "finish_reason": piece.finish_reason,
            "token_ids": [token.token_id for token in piece.tokens],
        }

    def opening(self, index: int) -> Object | None:
        return None

    def part(self, piece: Piece) -> Object:
        return self.choice(piece)

    def _logprobs(self, tokens: Sequence[Token]) -> Object:
        return {
            "tokens": [_name_of(token.token_id, self._answerer) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: Token) -> Object | None:
        """The most probable tokens, and the token itself if it is none of them."""
        if token.logprob is None:
            return None
        pairs = [*token.top, (token.token_id, token.logprob)]
        named: Object = {}
        for token_id, logprob in pairs:
            named.setdefault(_name_of(token_id, self._answerer), logprob)
        return named


class ChatShape:
    """/v1/chat/completions: a message, or the deltas of one."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answerer: Answerer, with_logprobs: bool) -> None:
        self._answerer = answerer
        self._with_logprobs = with_logprobs

    def choice(self, piece: Piece) -> Object:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def opening(self, index: int) -> Object | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, **self._rest(Piece(index))}

    def part(self, piece: Piece) -> Object:
        return {"index": piece.index, "delta": {"content": piece.text}, **self._rest(piece)}

    def _rest(self, piece: Piece) -> Object:
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
        name = _name_of(token_id, self._answerer)
        return {"token": name, "logprob": logprob, "bytes": _bytes_of(name)}


def _name_of(token_id: int, answerer: Answerer) -> str:
    """The text of a token by itself, also of a special one."""
    return answerer.decode([token_id], special_tokens=True)


def _bytes_of(name: str) -> list[int] | None:
    """None: the token is a part of a letter, which text cannot show."""
    return None if "\ufffd" in name else list(name.encode())
