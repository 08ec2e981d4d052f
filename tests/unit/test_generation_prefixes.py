"""The tree of kept rows against a list of them; a token's keys and values are its own number and those before it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tandem.generation.prefixes import PrefixCache, Read, Snapshot
from tandem.models.kv_cache import KeysValues, Prefix
from tandem.models.mixing import State
from tandem.types import IntArray


def states(row: Sequence[int]) -> list[int]:
    """A number for each token that depends on it and all before it."""
    return [hash(tuple(row[: place + 1])) % 2**40 for place in range(len(row))]


def reading(row: Sequence[int]) -> Read:
    def read(start: int, stop: int) -> KeysValues:
        values = torch.tensor(states(row)[start:stop], dtype=torch.int64)[None, None]
        return {0: [values, values + 1], 3: [values + 2, values + 3]}

    return read


def ids(row: Sequence[int]) -> IntArray:
    return np.array(row, dtype=np.int32)


def shared(row: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), min(len(row), len(other))
    )


def check(row: Sequence[int], found: Prefix | None, length: int) -> None:
    assert (found.length if found else 0) == length
    if found:
        for number, (layer, which) in enumerate(((0, 0), (0, 1), (3, 0), (3, 1))):
            assert (found.layer(layer, which)[0, 0] - number).tolist() == states(row)[:length]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_known_beginning_is_found(seed: int) -> None:
    """Few different tokens, so that rows share, part, end inside one another and come again."""
    random, cache, rows = np.random.default_rng(seed), PrefixCache(), list[list[int]]()
    for _ in range(60):
        start = rows[random.integers(len(rows))] if rows and random.random() < 0.6 else []
        row = [*start[: random.integers(len(start) + 1)], *random.integers(0, 3, random.integers(1, 9)).tolist()]
        known = max((shared(row[:-1], other) for other in rows), default=0)
        check(row, cache.longest(ids(row)), known)
        if random.random() < 0.7:
            cache.keep(ids(row), reading(row), room=10_000)
            rows.append(row)
            check([*row, 0], cache.longest(ids([*row, 0])), len(row))
    every = {tuple(row[: place + 1]) for row in rows for place in range(len(row))}
    assert cache.tokens == len(every), "a beginning that rows share is stored once"
    cache.clear()
    assert cache.tokens == 0 and cache.longest(ids(rows[0])) is None


@pytest.mark.parametrize("seed", range(20))
def test_it_never_holds_more_than_there_is_room_for(seed: int) -> None:
    random, cache, rows, room = np.random.default_rng(seed), PrefixCache(), list[list[int]](), 7 * seed % 41
    for _ in range(200):
        start = rows[random.integers(len(rows))] if rows else []
        row = [*start[: random.integers(len(start) + 1)], *random.integers(0, 3, random.integers(1, 9)).tolist()][:60]
        cache.keep(ids(row), reading(row), room)
        rows.append(row)
        kept = cache.longest(ids([*row, 0]))
        assert cache.tokens <= room
        check([*row, 0], kept, len(row) if len(row) <= room else kept.length if kept else 0)


def test_the_row_used_longest_ago_goes_first_and_what_others_share_stays() -> None:
    cache = PrefixCache()
    rows = [1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9]
    for row in rows:
        cache.keep(ids(row), reading(row), room=9)
    assert cache.tokens == 9
    check([1, 2, 3, 4, 0], cache.longest(ids([1, 2, 3, 4, 0])), 4)  # is used
    cache.keep(ids([6, 6]), reading([6, 6]), room=9)
    check([1, 2, 5, 6, 0], cache.longest(ids([1, 2, 5, 6, 0])), 2)
    check([7, 8, 9, 0], cache.longest(ids([7, 8, 9, 0])), 3)
    assert cache.tokens == 9


def snapshot(row: Sequence[int], tokens: int = 3) -> Snapshot:
    """A row's state is its tokens."""
    return Snapshot({0: State(torch.tensor([row]), None)}, tokens)


def state_of(found: Prefix | None) -> list[int]:
    return [] if found is None or found.states is None else found.states[0].conv[0].tolist()


@pytest.mark.parametrize("room", [10_000, 25, 14, 4])
@pytest.mark.parametrize("seed", range(5))
def test_with_states_a_beginning_ends_where_a_snapshot_was_taken(seed: int, room: int) -> None:
    random, cache, rows = np.random.default_rng(seed), PrefixCache(with_states=True), list[list[int]]()
    for _ in range(80):
        start = rows[random.integers(len(rows))] if rows and random.random() < 0.6 else []
        row = [*start[: random.integers(len(start) + 1)], *random.integers(0, 3, random.integers(1, 9)).tolist()]
        found = cache.longest(ids([*row, 0]))
        length = found.length if found else 0
        check([*row, 0], found, length)
        assert state_of(found) == row[:length] and (not length or row[:length] in rows)
        cache.keep(ids(row), reading(row), room, snapshot(row))
        rows.append(row)
        assert cache.tokens <= room and cache.tokens == sum(run.size for run in cache._by_use)
        assert (state_of(cache.longest(ids([*row, 0]))) == row) == (len(row) + 3 <= room)


def test_a_row_that_grows_drives_nobody_out_for_the_snapshot_that_it_replaces() -> None:
    cache, others = PrefixCache(with_states=True), [7] * 10
    row = list(range(10))
    for one in (row, others):
        cache.keep(ids(one), reading(one), 90, snapshot(one, 30))
    grown = [*row, 11]
    cache.keep(ids(grown), reading(grown), 90, snapshot(grown, 30))
    assert state_of(cache.longest(ids([*others, 0]))) == others and cache.tokens == 11 + 10 + 2 * 30


def test_a_row_that_goes_on_takes_the_place_of_its_beginnings_snapshot_and_forks_keep_theirs() -> None:
    cache = PrefixCache(with_states=True)
    for row in ([1, 2], [1, 2, 3, 4], [1, 2, 5]):
        cache.keep(ids(row), reading(row), 100, snapshot(row))
    assert cache.tokens == 5 + 2 * 3
    assert state_of(cache.longest(ids([1, 2, 9]))) == [], "where rows part there is none"
    assert state_of(cache.longest(ids([1, 2, 3, 4, 9]))) == [1, 2, 3, 4]
    assert state_of(cache.longest(ids([1, 2, 5, 9]))) == [1, 2, 5]
    cache.keep(ids([1, 2]), reading([1, 2]), 100, snapshot([1, 2]))
    assert state_of(cache.longest(ids([1, 2, 9]))) == [1, 2] and cache.tokens == 5 + 3 * 3
