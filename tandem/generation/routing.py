"""Requests -> replicas: the one that is through soonest, or one that knows the beginning of the prompt."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tandem.generation.replica import Replica
from tandem.types import IntArray

_STEP_TOKENS = 32
"""Beginnings of prompts are remembered at multiples of this length."""
_ENTRIES = 2**17
_SLACK = 1.5
"""A replica that knows the prompt's beginning gets it if it is through after at most this times the soonest's time."""


class PrefixRouter:
    """Remembers which replica had a prompt's beginning, whose keys and values that replica may still have cached."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Replica] = OrderedDict()
        """By hash of the beginning, the one used longest ago first."""

    def route(self, token_ids: IntArray, ends: Mapping[Replica, float]) -> Replica:
        """`ends`: when each would be through with what it has, in samples of a replica of average speed."""
        keys = _keys(token_ids)
        chosen = min(ends, key=lambda replica: ends[replica])
        known = next((self._seen[key] for key in reversed(keys) if key in self._seen), chosen)
        if known in ends and ends[known] <= _SLACK * ends[chosen] + 1:
            chosen = known
        self._note(keys, chosen)
        return chosen

    def note_end(self, token_ids: IntArray, replica: Replica) -> None:
        """A replica has computed these tokens, prompt and response: a prompt that goes on from them is known to it."""
        self._note(_keys(token_ids), replica)

    def _note(self, keys: Sequence[int], replica: Replica) -> None:
        for key in keys:
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > _ENTRIES:
            self._seen.popitem(last=False)


def _keys(token_ids: IntArray) -> list[int]:
    """One for each beginning that is remembered, the shortest first."""
    ends = range(_STEP_TOKENS, len(token_ids) + 1, _STEP_TOKENS)
    steps = (token_ids[end - _STEP_TOKENS : end].tobytes() for end in ends)
    return list(accumulate(steps, lambda key, step: hash((key, step)), initial=0))[1:]
