"""One choice of an answer: a sample's tokens become text, with the reason why it ended."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.serving.detokenizer import Decoder, Detokenizer, StopCutter
from tandem.types import Completion, Delta, PromptLogprobs, Request, Status, TopLogprobs

_LEAST_LOGPROB = -9999.0
"""OpenAI's number for a token that is very improbable; JSON has none for one that cannot be."""


class Token(NamedTuple):
    """A token with what the engine says of it."""

    token_id: int
    logprob: float | None
    """None: nothing predicts a prompt's first token."""
    offset: int
    """Where in the choice's text it begins."""
    top: list[tuple[int, float]]
    """The most probable tokens in its place and their log-probs; empty unless they were asked for."""


@dataclass(slots=True)
class ChoiceDelta:
    """A part of a choice, or all of it: some tokens, and the text that they made certain."""

    index: int
    text: str = ""
    prompt: list[Token] = field(default_factory=list[Token])
    """The prompt's tokens, where they are echoed with log-probs."""
    tokens: list[Token] = field(default_factory=list[Token])
    finish_reason: str | None = None
    """None: the choice goes on."""


class Choice:
    """Takes a sample's tokens as they come. Pieces, joined, do not depend on how many tokens came at once."""

    def __init__(self, index: int, request: Request, decode: Decoder, echo: str = "") -> None:
        """`echo`: text that the choice begins with."""
        self._index = index
        self._letters = Detokenizer(decode, request.token_ids.tolist())
        self._cutter = StopCutter(request.sampling.stop_strings)
        self._length = len(echo)
        """Characters so far, before stop strings are cut."""
        self._piece = ChoiceDelta(index, echo)
        """The part that `take` has not returned yet."""
        self.count = 0
        """The number of tokens so far, without the echoed prompt's."""
        self.ended = False

    def push_prompt(self, request: Request, scores: PromptLogprobs, decode: Decoder) -> None:
        """The echoed prompt's tokens have these log-probs; `decode` makes the echo of them."""
        letters, offset = Detokenizer(decode, []), 0
        logprobs = [None, *map(_told, scores.logprobs.tolist())]
        tops = [[], *_pairs(scores.top, len(scores.logprobs))]
        for token, logprob, top in zip(request.token_ids.tolist(), logprobs, tops, strict=True):
            self._piece.prompt.append(Token(token, logprob, offset, top))
            offset += len(letters.push(token))

    def push(self, output: Completion | Delta) -> None:
        """Add what the sample has gained."""
        tops = _pairs(output.top, len(output.token_ids))
        for token, logprob, top in zip(output.token_ids.tolist(), output.logprobs.tolist(), tops, strict=True):
            if self.ended:  # a stop string that only the text without special tokens shows
                return
            self._piece.tokens.append(Token(token, _told(logprob), self._length, top))
            self.count += 1
            text = self._letters.push(token)
            self._piece.text += self._cutter.push(text)
            self._length += len(text)
            if self._cutter.stopped:
                self.end(Status.COMPLETED)
        if output.status is not None and not self.ended:
            self.end(output.status)

    def end(self, status: Status) -> None:
        """Nothing more comes; what was held back is text after all."""
        self._piece.text += self._cutter.push(self._letters.end()) + self._cutter.end()
        stopped = status is Status.COMPLETED or self._cutter.stopped  # an unfinished letter may complete a stop string
        self._piece.finish_reason = "stop" if stopped else "length"
        self.ended = True

    def take(self) -> ChoiceDelta:
        """Returns what is new since the last call."""
        piece, self._piece = self._piece, ChoiceDelta(self._index)
        return piece


def _pairs(top: TopLogprobs | None, count: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens and their log-probs, at each of `count` positions."""
    if top is None:
        return [[] for _ in range(count)]
    rows = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return [list(zip(ids, map(_told, logprobs), strict=True)) for ids, logprobs in rows]


def _told(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
