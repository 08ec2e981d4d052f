"""The native engine's rows: which of them have the same tokens so far, whatever comes, goes and is looked at when."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest

from tandem.generation.native_rows import DecodeSlots
from tandem.generation.native_sample import NativeSample
from tandem.types import Request, SamplingParams

SLOTS, STEPS = 40, 60


def group(prompt: int, count: int) -> list[NativeSample]:
    request = Request(np.array([prompt], dtype=np.int32), SamplingParams(max_tokens=STEPS), tuple(range(count)))
    return [NativeSample(request, index, False, asyncio.Queue()) for index in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_with_the_same_tokens_are_found(seed: int) -> None:
    """Against a search through all tokens; with a small vocabulary, so that many stay alike for long."""
    rng, rows, prompts = np.random.default_rng(seed), DecodeSlots(SLOTS), 0
    said, tokens = 0, defaultdict[NativeSample, list[int]](list)
    for _ in range(STEPS):
        while len(rows) <= SLOTS - 6 and (not rows or rng.random() < 0.2):
            first, prompts = len(rows), prompts + 1
            rows.start([group(prompts, int(rng.integers(1, 7)))])
            take(rows, first, rng, tokens)
        found = rows.alike()
        truth = defaultdict[tuple[int, ...], set[int]](set)
        for slot, sample in enumerate(rows.samples):
            truth[sample.request.token_ids[0], *tokens[sample]].add(slot)
        if found is not None:
            said += 1
            slot_U, like_B = found
            groups = defaultdict[int, set[int]](set)
            for slot, number in enumerate(like_B.tolist()):
                groups[number].add(slot)
            assert sorted(map(sorted, groups.values())) == sorted(map(sorted, truth.values()))
            assert all(slot in groups[number] for number, slot in enumerate(slot_U.tolist()))
        else:
            assert 3 * len(truth) > len(rows), "a third of the passes would do"
        take(rows, 0, rng, tokens)
        if len(rows) and rng.random() < 0.3:
            gone = rng.choice(len(rows), size=int(rng.integers(1, len(rows) + 1)), replace=False)
            rows.remove(sorted(gone.tolist()))
    assert said > 2


def take(rows: DecodeSlots, first: int, rng: np.random.Generator, tokens: dict[NativeSample, list[int]]) -> None:
    """A token for each row from a slot on: mostly the same."""
    batch = rows.batch(first)
    token_B = np.where(rng.random(len(batch.slots)) < 0.97, 7, rng.integers(5, 9, len(batch.slots)))
    rows.take(batch, token_B, np.zeros(len(token_B), np.float32), 0)
    for slot, token in zip(batch.slots.tolist(), token_B.tolist(), strict=True):
        tokens[rows.samples[slot]].append(token)


def test_what_is_known_of_a_batch_is_known_until_a_row_comes_or_goes() -> None:
    rows = DecodeSlots(8)
    rows.start([group(1, 2)])
    whole = rows.batch(0)
    assert rows.batch(0) is whole and rows.batch(1).slots.tolist() == [1]
    rows.start([group(2, 3)])
    assert rows.batch(0).slots.tolist() == [0, 1, 2, 3, 4]
    assert rows.remove([0, 3]) == ([4], [0])
    assert [int(sample.request.token_ids[0]) for sample in rows.samples] == [2, 1, 2]
    assert rows.batch(0).slots.tolist() == [0, 1, 2]
    rows.clear()
    assert not rows and len(rows.batch(0).slots) == 0
