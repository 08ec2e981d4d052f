"""Trajectories and demonstrations -> Batch -> optimizer steps -> micro-batches.

Suffixes: `_B` rows of the batch, `_R` rows of a micro-batch, `_N` its tokens, prompts included, `_S` its scored tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.types import Batch, BoolArray, Demonstration, FloatArray, Group, IntArray, MicroBatch, TokenColumns


def to_batch(groups: Sequence[Group]) -> Batch:
    """The trajectories of a step, groups in order; a row whose score has no value is neither `scored` nor masked in."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [score.value for group in groups for score in group.scores]
    batch = demonstrations_to_batch([Demonstration(0, r.prompt.token_ids, r.response_ids, r.loss_mask) for r in rows])
    batch.scored = np.array([reward is not None for reward in rewards], dtype=np.bool_)
    batch.rewards = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float32)
    batch.loss_mask &= np.repeat(batch.scored, np.diff(batch.response_offsets))
    batch.groups = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.trajectories) for group in groups])
    batch.versions = _head_to_tail([row.versions for row in rows], np.int32)
    batch.tokens.rollout_logprobs = _head_to_tail([row.rollout_logprobs for row in rows], np.float32)
    return batch


def demonstrations_to_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """Rows to imitate: each a group of its own, reward 0, no token columns yet."""
    return Batch(
        prompt_ids=_head_to_tail([row.prompt_ids for row in demonstrations], np.int32),
        prompt_offsets=_offsets([len(row.prompt_ids) for row in demonstrations]),
        response_ids=_head_to_tail([row.response_ids for row in demonstrations], np.int32),
        response_offsets=_offsets([len(row.response_ids) for row in demonstrations]),
        loss_mask=_head_to_tail([row.loss_mask for row in demonstrations], np.bool_),
        versions=np.zeros(sum(len(row.response_ids) for row in demonstrations), dtype=np.int32),
        groups=np.arange(len(demonstrations), dtype=np.int32),
        rewards=np.zeros(len(demonstrations), dtype=np.float32),
        scored=np.ones(len(demonstrations), dtype=np.bool_),
        tokens=TokenColumns(),
    )


def split_groups(batch: Batch, parts: int, seed: int | Sequence[int]) -> list[IntArray]:
    """Rows of each of `parts` optimizer steps: siblings stay together, token counts are near-equal, order is by `seed`.

    Groups are dealt in shuffled order, each to the step with the fewest tokens so far. Fewer groups than `parts` give
    as many steps as there are groups.
    """
    groups, group_of_row_B = np.unique(batch.groups, return_inverse=True)
    tokens_of_group = np.bincount(group_of_row_B, weights=_row_lengths(batch))
    totals = np.zeros(min(parts, len(groups)))
    part_of_group = np.zeros(len(groups), dtype=np.int64)
    for group in np.random.default_rng(seed).permutation(len(groups)):
        part_of_group[group] = part = int(totals.argmin())
        totals[part] += tokens_of_group[group]
    return [np.flatnonzero(part_of_group[group_of_row_B] == part) for part in range(len(totals))]


def micro_batches(batch: Batch, rows: Sequence[int] | IntArray, tokens_per_micro_batch: int) -> list[MicroBatch]:
    """`rows` packed longest first, at most `tokens_per_micro_batch` tokens each; a longer row is alone.

    A row without tokens in `loss_mask` is left out. Attention over packed rows is fastest on rows of like length.
    """
    lengths_B = _row_lengths(batch)
    kept: IntArray = np.asarray(rows, dtype=np.int64)
    kept = kept[np.bincount(batch.row_of_token[batch.loss_mask], minlength=len(batch))[kept] > 0]
    ordered = kept[np.argsort(-lengths_B[kept], kind="stable")]
    ends = np.cumsum(lengths_B[ordered])
    tokens: IntArray = np.concatenate((batch.prompt_ids, batch.response_ids))
    mask: BoolArray = np.concatenate((np.zeros(len(batch.prompt_ids), dtype=np.bool_), batch.loss_mask))
    result: list[MicroBatch] = []
    start = used = 0
    while start < len(ordered):
        stop = max(start + 1, int(np.searchsorted(ends, used + tokens_per_micro_batch, side="right")))
        result.append(_pack(batch, ordered[start:stop], tokens, mask))
        start, used = stop, int(ends[stop - 1])
    return result


def _pack(batch: Batch, rows_R: IntArray, tokens: IntArray, mask: BoolArray) -> MicroBatch:
    """`tokens` are the prompts and then the responses of the batch; `mask` says which of them are scored."""
    prompts = len(batch.prompt_ids)
    bounds = [(batch.prompt_offsets[rows], batch.response_offsets[rows] + prompts) for rows in (rows_R, rows_R + 1)]
    starts, stops = np.array(bounds).swapaxes(1, 2).reshape(2, -1)
    segments = _offsets(stops - starts)
    take_N: IntArray = np.add(np.repeat(starts - segments[:-1], stops - starts), np.arange(int(segments[-1])))
    target_S = np.flatnonzero(mask[take_N])
    source_S: IntArray = np.subtract(take_N[target_S], prompts)
    columns = batch.tokens.map(lambda column: column[source_S])
    return MicroBatch(tokens[take_N], segments[::2], target_S - 1, columns, source_S)


def _row_lengths(batch: Batch) -> IntArray:
    return np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets)


def _offsets(lengths: Sequence[int] | IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _head_to_tail(arrays: Sequence[IntArray | BoolArray | FloatArray], dtype: type[np.generic]) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
