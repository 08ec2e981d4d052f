"""Prompts that begin alike -> a tree of segments: what prompts share is computed once.

    system prompt ┬ question 1 ┬ turn 1 ┬ turn 2 ── …     the prompts of a conversation's branches
                  │            └ …
                  └ question 2                             another group's

Prompts share whole blocks of tokens from their beginning on, as engines that keep prefixes share them: so no segment
is too short to be worth a call of its own, and how many tokens prompts have together is a sum.

Suffix: `_P` distinct prompts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tandem.types import IntArray

BLOCK = 128
"""Tokens."""

Path = tuple[int, ...]
"""A number for each whole block of a prompt, the same in all prompts that are the same up to the block's end."""


def paths_of(prompts: Iterable[IntArray]) -> list[Path]:
    """The path of each prompt, int32 token ids; empty for one that is shorter than a block."""
    numbers: dict[tuple[int, bytes], int] = {}
    paths: list[Path] = []
    for prompt in prompts:
        path: list[int] = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            step = (path[-1] if path else -1, prompt[end - BLOCK : end].tobytes())
            path.append(numbers.setdefault(step, len(numbers)))
        paths.append(tuple(path))
    return paths


class PromptSegments(NamedTuple):
    """The segments of some prompts; each stands after the one that it continues."""

    starts: IntArray
    """Where the tokens of each begin among those that the prompts are taken from."""
    lengths: IntArray
    prefixes: IntArray
    """The segment that each continues; -1: none."""
    last_P: IntArray
    """The segment that ends where a prompt does; -1: the prompt has no tokens."""


def segments_of(starts_P: IntArray, lengths_P: IntArray, paths_P: Sequence[Path]) -> PromptSegments:
    """The fewest segments of distinct prompts, of which `starts_P` and `lengths_P` say where their tokens are."""
    sharing = Counter(number for path in paths_P for number in path)
    found: list[tuple[int, int, int]] = []
    shared: dict[int, int] = {}
    """The segment that begins with a block, by the block's number."""
    last: list[int] = []
    for start, length, path in zip(starts_P.tolist(), lengths_P.tolist(), paths_P, strict=True):
        above, done = -1, 0
        for first, count in _runs(path, sharing):
            if first not in shared:
                shared[first] = len(found)
                found.append((start + done, count * BLOCK, above))
            above, done = shared[first], done + count * BLOCK
        if done < length:
            found.append((start + done, length - done, above))
            above = len(found) - 1
        last.append(above)
    starts, lengths, prefixes = np.array(found, np.int64).reshape(-1, 3).T
    return PromptSegments(starts, lengths, prefixes, np.array(last, np.int64))


def _runs(path: Path, sharing: Counter[int]) -> Iterable[tuple[int, int]]:
    """The first number and the length of each run of blocks that the same prompts share.

    Who shares a block shares those before it, so as many prompts are the same prompts.
    """
    begin = 0
    for at, number in enumerate(path):
        if sharing[number] == 1:
            break
        if at + 1 == len(path) or sharing[path[at + 1]] != sharing[number]:
            yield path[begin], at + 1 - begin
            begin = at + 1
