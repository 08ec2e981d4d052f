"""One choice of an answer: a sample's tokens become text, with the reason why it ended."""

from dataclasses import dataclass, field

from tandem.serving.base import Answerer
from tandem.serving.text import Detokenizer, StopCutter
from tandem.types import Completion, Delta, Request, Status


@dataclass(slots=True)
class Piece:
    """A part of a choice, or all of it: some tokens, and the text that they made certain."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    offsets: list[int] = field(default_factory=list[int])
    """Where in the choice's text each token begins."""
    finish_reason: str | None = None
    """None: the choice goes on."""


class Choice:
    """Takes a sample's tokens as they come. Pieces, joined, do not depend on how many tokens came at once."""

    def __init__(self, index: int, answerer: Answerer, request: Request, echo: str = "") -> None:
        """`echo`: text that the choice begins with."""
        self._index = index
        self._letters = Detokenizer(answerer.decode, request.token_ids.tolist())
        self._cutter = StopCutter(request.sampling.stop_strings)
        self._length = len(echo)
        """Characters so far, before stop strings are cut."""
        self._piece = Piece(index, echo)
        """What `take` has not returned yet."""
        self.ended = False

    @property
    def has_news(self) -> bool:
        """There is text, or an end, that `take` has not returned."""
        return bool(self._piece.text) or self._piece.finish_reason is not None

    def push(self, output: Completion | Delta) -> None:
        """Add what the sample has gained."""
        for token, logprob in zip(output.token_ids.tolist(), output.logprobs.tolist(), strict=True):
            if self.ended:  # a stop string that only the text without special tokens shows
                return
            text = self._letters.push(token)
            self._piece.text += self._cutter.push(text)
            self._piece.token_ids.append(token)
            self._piece.logprobs.append(logprob)
            self._piece.offsets.append(self._length)
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

    def take(self) -> Piece:
        """What is new since the last call."""
        piece, self._piece = self._piece, Piece(self._index)
        return piece
