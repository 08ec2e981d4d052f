"""Stop strings: whether the text of the last tokens holds one."""

from collections.abc import Sequence
from typing import Any

from tandem.types import IntArray


def longest_stop_string(strings: Sequence[str]) -> int:
    """The most tokens that a stop string can have: a token is at least a byte of text."""
    return max(len(string.encode()) for string in strings)


def holds_stop_string(token_ids: IntArray, strings: Sequence[str], tokenizer: Any) -> bool:
    """Whether a stop string ends in the last token; earlier ones have been looked at before."""
    tail = longest_stop_string(strings) + 8  # a few more give the decoder the context of the first one
    text = tokenizer.decode(token_ids[-tail:].tolist(), skip_special_tokens=False)
    return any(string in text for string in strings)
