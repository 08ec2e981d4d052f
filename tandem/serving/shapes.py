"""Pieces of choices -> the objects that OpenAI publishes. Choices have `token_ids` besides."""

from collections.abc import Sequence
from typing import Any, Protocol

from tandem.serving.base import Answerer
from tandem.serving.choice import Piece

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
            "logprobs": self._logprobs(piece) if self._with_logprobs else None,
            "finish_reason": piece.finish_reason,
            "token_ids": piece.token_ids,
        }

    def opening(self, index: int) -> Object | None:
        return None

    def part(self, piece: Piece) -> Object:
        return self.choice(piece)

    def _logprobs(self, piece: Piece) -> Object:
        return {
            "tokens": names_of(piece.token_ids, self._answerer),
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": piece.offsets,
        }


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
            "logprobs": self._logprobs(piece) if self._with_logprobs else None,
            "finish_reason": piece.finish_reason,
            "token_ids": piece.token_ids,
        }

    def _logprobs(self, piece: Piece) -> Object:
        names = names_of(piece.token_ids, self._answerer)
        content = [
            {"token": name, "logprob": logprob, "bytes": _bytes_of(name), "top_logprobs": []}
            for name, logprob in zip(names, piece.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def names_of(token_ids: Sequence[int], answerer: Answerer) -> list[str]:
    """The text of each token by itself, special tokens too."""
    return [answerer.decode([token], special_tokens=True) for token in token_ids]


def _bytes_of(name: str) -> list[int] | None:
    """None: the token is a part of a letter, which text cannot show."""
    return None if "\ufffd" in name else list(name.encode())
