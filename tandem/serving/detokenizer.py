"""Token ids -> text, token by token: a stream's pieces, joined, are the text of the whole answer."""

from collections.abc import Sequence
from typing import Protocol

_CONTEXT_TOKENS = 6
"""Tokens before a piece that decide how it begins: whether with a space, or inside a letter."""
_LETTER_TOKENS = 4
"""Tokens that one letter may be spread over: the bytes of UTF-8."""
_MOST_HELD = 8
"""How many tokens are held back at most for a letter; then those that no later token can finish go out."""
_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """Token ids -> their text."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """Decodes a window of the last tokens with each new one, so that the cost does not grow with the answer."""

    def __init__(self, decode: Decoder, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._known = list(prompt_ids[-_CONTEXT_TOKENS:])
        """The last tokens whose text has been returned."""
        self._new: list[int] = []
        """Tokens after them whose text has not: they end within a letter."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes certain."""
        self._new.append(token_id)
        if not self._text_of(self._new).endswith(_UNFINISHED):
            return self._settle(len(self._new))
        return self._settle(self._count_of_finished()) if len(self._new) >= _MOST_HELD else ""

    def end(self) -> str:
        """Returns what is left: the bytes of a letter that was never finished."""
        return self._settle(len(self._new)) if self._new else ""

    def _settle(self, count: int) -> str:
        """Returns the text of the first new tokens, and counts them among the known ones."""
        text = self._text_of(self._new[:count])
        self._known = [*self._known, *self._new[:count]][-_CONTEXT_TOKENS:]
        del self._new[:count]
        return text

    def _count_of_finished(self) -> int:
        """How many of the new tokens come before every letter that a later token may still finish."""
        text = self._text_of(self._new)
        for count in range(len(self._new) - _LETTER_TOKENS + 1, 0, -1):
            if text == self._text_of(self._new[:count]) + self._decode(self._new[count:]):
                return count
        return len(self._new)

    def _text_of(self, new: Sequence[int]) -> str:
        """What these tokens add to the text of the known ones."""
        return self._decode([*self._known, *new])[len(self._decode(self._known)) :]


class StopCutter:
    """Text up to the first stop string, which may come in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        """The end of the text so far, where it may be the beginning of a stop string."""
        self.stopped = False

    def push(self, text: str) -> str:
        """Returns the part of the text that is certainly before every stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Returns what is left: the beginning of a stop string that never came."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
