"""What an answer in a conversation is made of: the policy's own turns, not what tools and users say."""

from collections.abc import Mapping, Sequence
from typing import Any

Turns = Sequence[Mapping[str, Any]]


def own_words(text: str, turns: Turns) -> str:
    """The content of all `turns`; without any, `text`, which is all of an answer of one turn."""
    return "\n".join(str(turn["content"]) for turn in turns) if turns else text
