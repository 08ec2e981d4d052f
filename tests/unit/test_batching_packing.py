"""Trajectories -> batch -> optimizer steps -> micro-batches, with numbers small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.batching.packing import demonstrations_to_batch, micro_batches, select_rows, split_groups, to_batch
from tandem.types import Batch, Demonstration, Group, Prompt, Score, Status, TokenColumns, Trajectory


def trajectory(prompt_ids: list[int], response_ids: list[int], mask: list[bool], sample: int = 0) -> Trajectory:
    return Trajectory(
        prompt=Prompt(0, np.array(prompt_ids, dtype=np.int32), "", "source", None),
        sample=sample,
        response_ids=np.array(response_ids, dtype=np.int32),
        loss_mask=np.array(mask),
        rollout_logprobs=-np.array(response_ids, dtype=np.float32),
        versions=np.full(len(response_ids), 3, dtype=np.int32),
        text="",
        status=Status.COMPLETED,
    )


@pytest.fixture
def batch() -> Batch:
    """Rows of 2+2, 2+3, 3+1 and 3+1 tokens in two groups; the third has no reward."""
    return to_batch(
        [
            Group(
                [trajectory([1, 2], [10, 11], [True, True]), trajectory([1, 2], [12, 13, 14], [True, False, True], 1)],
                [Score(1.0), Score(0.5)],
            ),
            Group(
                [trajectory([3, 4, 5], [15], [True]), trajectory([3, 4, 5], [16], [True], 1)],
                [Score(None, failure=Status.REWARD_ERROR), Score(-2.0)],
            ),
        ]
    )


def test_to_batch_lays_rows_head_to_tail(batch: Batch) -> None:
    assert batch.prompt_ids.tolist() == [1, 2, 1, 2, 3, 4, 5, 3, 4, 5]
    assert batch.prompt_offsets.tolist() == [0, 2, 4, 7, 10]
    assert batch.response_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.response_offsets.tolist() == [0, 2, 5, 6, 7]
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.versions.tolist() == [3] * 7
    assert batch.tokens.rollout_logprobs is not None
    assert batch.tokens.rollout_logprobs.tolist() == [-10, -11, -12, -13, -14, -15, -16]
    types = [batch.prompt_ids, batch.prompt_offsets, batch.groups, batch.rewards, batch.tokens.rollout_logprobs]
    assert [str(array.dtype) for array in types] == ["int32", "int64", "int32", "float32", "float32"]


def test_recorded_choices_stay_with_their_tokens() -> None:
    rows = [trajectory([1, 2], [10, 11], [True] * 2), trajectory([1, 2], [12, 13, 14], [True] * 3, 1)]
    for row in rows:
        tokens = np.concatenate((row.prompt.token_ids, row.response_ids))[:-1]
        row.experts = np.stack([tokens, tokens + 100], axis=1)[:, None]  # of one layer, two experts a token
    batch = select_rows(to_batch([Group(rows, [Score(1.0), Score(0.5)])]), np.array([1, 0]))
    (part,) = micro_batches(batch, range(2), 1000)
    assert part.experts is not None and part.experts.shape == (len(part.token_ids), 1, 2)
    assert part.experts[:, 0].tolist() == [[token, token + 100] for token in part.token_ids]
    without_turns = trajectory([1, 2, 3], [], [])
    batch = to_batch([Group([*rows, without_turns], [Score(1.0), Score(0.5), Score(0.0)])])
    assert batch.experts is not None and len(batch.experts) == len(batch.prompt_ids) + len(batch.response_ids)
    rows[0].experts = None
    assert to_batch([Group(rows, [Score(1.0), Score(0.5)])]).experts is None


def test_a_row_without_a_reward_is_neither_scored_nor_masked_in(batch: Batch) -> None:
    assert batch.rewards.tolist() == [1.0, 0.5, 0.0, -2.0]
    assert batch.scored.tolist() == [True, True, False, True]
    assert batch.loss_mask.tolist() == [True, True, True, False, True, False, True]


def test_demonstrations_become_rows_of_their_own_groups() -> None:
    rows = [
        Demonstration(4, np.array([1, 2]), np.array([3, 4, 5]), np.array([True, False, True])),
        Demonstration(9, np.array([6]), np.array([7]), np.array([True])),
    ]
    batch = demonstrations_to_batch(rows)
    assert batch.response_ids.tolist() == [3, 4, 5, 7] and batch.response_offsets.tolist() == [0, 3, 4]
    assert batch.loss_mask.tolist() == [True, False, True, True]
    assert batch.groups.tolist() == [0, 1] and batch.scored.all() and batch.tokens == TokenColumns()


def test_siblings_share_their_prompt_and_last_tokens_are_left_out(batch: Batch) -> None:
    (packed,) = micro_batches(batch, [0, 1, 2, 3], 100)
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 12, 13, 10]
    assert packed.offsets.tolist() == [0, 2, 5, 7, 8]
    assert packed.prefixes.tolist() == [-1, -1, 0, 0]
    assert packed.predicted_at.tolist() == [1, 6, 1, 7, 4]
    assert packed.targets.tolist() == [12, 14, 10, 11, 16]
    assert packed.source.tolist() == [2, 4, 0, 1, 6]
    assert packed.columns.rollout_logprobs is not None
    assert packed.columns.rollout_logprobs.tolist() == [-12, -14, -10, -11, -16]


def test_siblings_that_said_the_same_are_computed_once() -> None:
    """Rows 0 and 2 differ in their last token alone; row 3 says what row 0 says, in another group."""
    answers = [[10, 11, 12], [10, 12], [10, 11, 13]]
    siblings = [trajectory([1, 2], answer, [True] * len(answer), i) for i, answer in enumerate(answers)]
    other = trajectory([1, 2], [10, 11, 12], [True] * 3)
    batch = to_batch([Group(siblings, [Score(1.0)] * 3), Group([other], [Score(0.0)])])
    (packed,) = micro_batches(batch, range(4), 100)
    assert packed.token_ids.tolist() == [1, 2, 1, 2, 10, 11, 10, 10, 11]
    assert packed.offsets.tolist() == [0, 2, 4, 6, 7, 9] and packed.prefixes.tolist() == [-1, -1, 0, 0, 1]
    assert packed.source.tolist() == [0, 1, 2, 5, 6, 7, 3, 4, 8, 9, 10]
    assert packed.predicted_at.tolist() == [1, 4, 5, 1, 4, 5, 1, 6, 3, 7, 8]
    assert packed.targets.tolist() == [10, 11, 12, 10, 11, 13, 10, 12, 10, 11, 12]


def test_micro_batches_keep_to_the_budget_and_a_longer_row_is_alone(batch: Batch) -> None:
    assert [m.token_ids.tolist() for m in micro_batches(batch, [3, 1, 0], 6)] == [[1, 2, 12, 13, 10], [3, 4, 5]]
    assert [m.token_ids.tolist() for m in micro_batches(batch, range(4), 1)] == [[1, 2, 12, 13], [1, 2, 10], [3, 4, 5]]
    assert micro_batches(batch, [2], 100) == [] and micro_batches(batch, [], 100) == []


def test_micro_batches_of_many_rows_cover_each_scored_token_once() -> None:
    batch, _ = random_batch(200, group_size=4)
    packed = micro_batches(batch, range(200), 300)
    assert sorted(np.concatenate([m.source for m in packed])) == np.flatnonzero(batch.loss_mask).tolist()
    assert all(len(m.token_ids) <= 300 for m in packed)
    assert len(packed) <= 1.25 * sum(len(m.token_ids) for m in packed) / 300
    for m in packed:
        assert (batch.response_ids[m.source] == m.targets).all()


@pytest.mark.parametrize("parts", [1, 3, 4, 7])
def test_optimizer_steps_keep_siblings_together_and_share_tokens_evenly(parts: int) -> None:
    batch, lengths = random_batch(192, group_size=8)
    split = split_groups(batch, parts, seed=5)
    assert sorted(np.concatenate(split)) == list(range(192)) and len(split) == parts
    group_sets = [set(batch.groups[rows].tolist()) for rows in split]
    assert sum(map(len, group_sets)) == 24
    tokens = [lengths[rows].sum() for rows in split]
    largest_group = np.bincount(batch.groups, weights=lengths).max()
    assert max(tokens) - min(tokens) <= largest_group


def test_the_split_depends_on_the_seed_alone() -> None:
    batch, _ = random_batch(64, group_size=4)
    first, again, other = (split_groups(batch, 4, seed) for seed in (1, 1, 2))
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in again]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in other]


def test_fewer_groups_than_parts_give_one_step_each(batch: Batch) -> None:
    assert sorted(rows.tolist() for rows in split_groups(batch, 5, seed=0)) == [[0, 1], [2, 3]]


def random_batch(rows: int, group_size: int) -> tuple[Batch, np.ndarray]:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 120, rows)
    demonstrations = [
        Demonstration(i, np.array([1, 2]), np.arange(n, dtype=np.int32), random.random(n) < 0.9)
        for i, n in enumerate(lengths)
    ]
    return demonstrations_to_batch(demonstrations, np.arange(rows) // group_size), lengths + 2
