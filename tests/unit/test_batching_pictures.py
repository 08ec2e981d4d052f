"""Pictures among tokens: two that take the same placeholders are never taken for one, and each token keeps its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tandem.batching.packing import demonstrations_to_batch, micro_batches, select_rows, to_batch
from tandem.batching.prompt_trees import BLOCK
from tandem.pictures.marks import PictureNumbers, content_marked
from tandem.pictures.positions import places_of
from tandem.types import Demonstration, Group, MicroBatch, Picture, Prompt, Score, Status, Trajectory

PLACEHOLDER = 7
GRIDS = {"red": (1, 2), "blue": (1, 2), "green": (3, 2), "tall": (9, 1)}


def picture(name: str, place: int) -> Picture:
    return Picture(hashlib.sha256(name.encode()).hexdigest(), GRIDS[name], place)


def demonstration(prompt: list[int | str], answer: list[int | str]) -> Demonstration:
    """A name stands for a picture, which is not learned."""
    ids, pictures, cut = list[int](), list[Picture](), 0
    for place, part in enumerate([*prompt, *answer]):
        if isinstance(part, str):
            pictures.append(picture(part, len(ids)))
            ids += [PLACEHOLDER] * (GRIDS[part][0] * GRIDS[part][1])
        else:
            ids.append(part)
        cut = len(ids) if place == len(prompt) - 1 else cut
    made = np.array(ids, np.int32)
    return Demonstration(0, made[:cut], made[cut:], made[cut:] != PLACEHOLDER, tuple(pictures))


def whole(row: Demonstration) -> tuple[list[list[int]], int]:
    """Positions of a row that is one segment, and the position after it."""
    numbers = PictureNumbers()
    marked = numbers.mark(np.concatenate((row.prompt_ids, row.response_ids)), row.pictures)
    bounds = np.array([0, len(marked)])
    places = places_of(marked, bounds, np.array([-1]), numbers.pictures, spatial=True)
    return places.positions.tolist(), int(places.ends[0])


def span(one: Picture) -> slice:
    return slice(one.place, one.place + one.grid[0] * one.grid[1])


def test_positions_of_text_count_on_and_those_of_a_picture_span_its_grid() -> None:
    row = demonstration([1, 2, "green", 3, "red"], [])
    assert whole(row) == (
        [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6], [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6], [0, 1, 2, 3, 2, 3, 2, 3, 5, 6, 7]],
        8,
    )


def test_marks_tell_pictures_apart() -> None:
    rows = [demonstration([1, name, 2], [5]) for name in ("red", "blue", "red")]
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist()
    numbers = PictureNumbers()
    marked = [numbers.mark(row.prompt_ids, row.pictures).tolist() for row in rows]
    assert marked == [[1, -1, -1, 2], [1, -2, -2, 2], [1, -1, -1, 2]]
    with pytest.raises(ValueError, match="takes 2 tokens from 3 on, and 1 of 4 are there"):
        numbers.mark(rows[0].prompt_ids, [picture("red", 3)])


def test_numbers_of_pictures_that_nobody_shows_go_to_others() -> None:
    numbers, ids = PictureNumbers(), np.array([8, 7, 7, 8], np.int32)
    shown = [Picture(name, (1, 2), 1) for name in "abcdefgh"]
    first = numbers.mark(ids, shown[:1])
    for one in shown[1:]:
        assert first.tolist() == [8, -1, -1, 8] and numbers.mark(ids, [one]).tolist() == [8, -2, -2, 8]
        assert numbers.pictures == [shown[0], one]
        numbers.forget([first])
    assert numbers.mark(ids, shown[:1]).tolist() == first.tolist(), "one that is still shown keeps its number"
    numbers.forget([])
    assert {tuple(numbers.mark(ids, [one])[1:3]) for one in shown[2:4]} == {(-1, -1), (-2, -2)}
    assert len(numbers.pictures) == 2


def test_marks_by_content_are_the_same_without_a_memory() -> None:
    ids = np.array([8, 7, 7, 8], np.int32)
    one, again, other = (content_marked(ids, [Picture(name, (1, 2), 1)]) for name in "aab")
    assert (one == again).all() and (one[1:3] != other[1:3]).all() and (one[1:3] < 0).all()
    assert one.dtype == np.int32 and content_marked(ids, []) is ids


def test_siblings_share_a_prompt_only_where_its_pictures_are_the_same() -> None:
    rows = [demonstration([1, name, 2], [5, 6]) for name in ("red", "blue", "red")]
    batch = demonstrations_to_batch(rows, np.zeros(3, np.int32))
    assert batch.prompts.tolist() == [0, 1, 0]
    (part,) = micro_batches(batch, range(3), 1000)
    assert (part.prefixes == -1).sum() == 2 and len(part.pictures) == 2
    assert len(part.prefixes) == 4  # two prompts, and an answer that the two rows with the same prompt have together


@pytest.mark.parametrize(("other", "shared"), [("red", True), ("blue", False)])
def test_prompts_of_groups_share_blocks_only_where_pictures_are_the_same(other: str, shared: bool) -> None:
    """The second block is the same in both, but what stands before it is not."""
    rows = [demonstration([1, name, *([3] * (2 * BLOCK)), end], [5, 6]) for end, name in enumerate(("red", other))]
    batch = demonstrations_to_batch(rows, np.arange(2))
    (part,) = micro_batches(batch, range(2), 10_000)
    assert len(part.token_ids) == sum(len(row.prompt_ids) + 1 for row in rows) - shared * 2 * BLOCK


def test_a_step_carries_the_pictures_of_its_prompts() -> None:
    row = demonstration([1, "red", 2], [5, 6])
    prompt = Prompt(0, row.prompt_ids, "", "source", None, pictures=row.pictures)
    arrays = row.response_ids, row.loss_mask, np.zeros(2, np.float32), np.zeros(2, np.int32)
    answered = Trajectory(prompt, 0, *arrays, "", Status.COMPLETED)
    text = replace(answered, prompt=replace(prompt, pictures=()))
    batch = to_batch([Group([text, answered], [Score(0.0), Score(1.0)])])
    assert batch.pictures == row.pictures and batch.prompts.tolist() == [0, 1]
    assert batch.prompt_ids.tolist() == [1, PLACEHOLDER, PLACEHOLDER, 2, 1, -1, -1, 2]
    assert select_rows(batch, np.array([1])).pictures == row.pictures
    assert to_batch([Group([text], [Score(0.0)])]).pictures == ()


def test_a_step_carries_the_pictures_that_tools_have_shown() -> None:
    """And answers that differ in such a picture alone are not computed once for both."""
    rows = [demonstration([1, "red", 2], [5, 3, name, 4, 6]) for name in ("blue", "green", "blue")]
    assert rows[0].loss_mask.tolist() == [True, True, False, False, True, True]
    trajectories = [
        Trajectory(
            Prompt(0, row.prompt_ids, "", "source", None, pictures=row.pictures[:1]),
            sample,
            row.response_ids,
            row.loss_mask,
            np.zeros(len(row.response_ids), np.float32),
            np.zeros(len(row.response_ids), np.int32),
            "",
            Status.COMPLETED,
            pictures=row.pictures[1:],
        )
        for sample, row in enumerate(rows)
    ]
    batch = to_batch([Group(trajectories, [Score(0.0)] * 3)])
    assert [one.key for one in batch.pictures] == [picture(name, 0).key for name in ("red", "blue", "green")]
    assert batch.prompts.tolist() == [0, 0, 0]
    assert batch.response_ids[batch.response_offsets[1] :].tolist() == [5, 3, *[-3] * 6, 4, 6, 5, 3, -2, -2, 4, 6]
    (part,) = micro_batches(batch, range(3), 1000)
    assert len(part.prefixes) == 3  # the prompt, and two answers to it


def drawn(seed: int) -> list[Demonstration]:
    """Rows of a few groups; prompts are of few pieces, so that they begin alike, with pictures across blocks."""
    random = np.random.default_rng(seed)
    names, rows = list(GRIDS), list[Demonstration]()
    for _ in range(14):
        prompt: list[int | str] = []
        for piece in random.integers(0, 3, random.integers(1, 5)):
            prompt += [3] * int(random.choice([BLOCK - 4, 5])) + ([names[random.integers(4)]] if piece else [])
        answer: list[int | str] = [*random.integers(10, 12, random.integers(1, 5)).tolist()]
        if random.random() < 0.5:
            answer += [names[random.integers(4)], *random.integers(10, 12, 2).tolist()]
        rows.append(demonstration([*prompt, 4], answer))
    return rows


Seen = tuple[int, list[int | tuple[str, int]], list[list[int]]]


def seen(part: MicroBatch) -> list[Seen]:
    """For each scored token: where it is in the batch, and the tokens and positions that it is predicted from."""
    places = places_of(part.token_ids, part.offsets, part.prefixes, part.pictures, spatial=True)
    shown = [part.pictures[number] for number in places.numbers]
    features = [(one.key, place) for one in shown for place in range(one.grid[0] * one.grid[1])]
    taken = iter(places.features.tolist())
    tokens = [features[next(taken)] if token < 0 else token for token in part.token_ids.tolist()]
    assert next(taken, None) is None
    found: list[Seen] = []
    for place, source in zip(part.predicted_at.tolist(), part.source.tolist(), strict=True):
        segment, end, spans = int(np.searchsorted(part.offsets, place, side="right")) - 1, place + 1, list[range]()
        while segment >= 0:
            spans.insert(0, range(part.offsets[segment], end))
            segment = int(part.prefixes[segment])
            end = int(part.offsets[segment + 1])
        at = [place for own in spans for place in own]
        found.append((source, [tokens[place] for place in at], places.positions[:, at].tolist()))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_token_sees_its_own_pictures_at_its_own_positions(seed: int) -> None:
    """Of some of the rows, too, whose batch names pictures that they do not show."""
    rows = drawn(seed)
    batch = demonstrations_to_batch(rows, np.sort(np.random.default_rng(seed).integers(0, 4, len(rows))))
    for chosen in (np.arange(len(rows)), np.arange(3, 11)):
        part_of = select_rows(batch, chosen)
        found = [one for part in micro_batches(part_of, range(len(part_of)), 700) for one in seen(part)]
        assert len(found) > 8
        for source, tokens, positions in found:
            place = int(part_of.row_of_token[source])
            row = rows[int(chosen[place])]
            expected: list[int | tuple[str, int]] = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
            for one in row.pictures:
                expected[span(one)] = [(one.key, place) for place in range(one.grid[0] * one.grid[1])]
            count = len(row.prompt_ids) + source - int(part_of.response_offsets[place])
            assert tokens == expected[:count]
            assert positions == [dimension[:count] for dimension in whole(row)[0]]
