"""Trajectories and demonstrations -> Batch -> optimizer steps -> micro-batches.

Suffixes as in `tandem.types`, and `_R`: rows of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.types import (
    Batch,
    BoolArray,
    Demonstration,
    FloatArray,
    Group,
    IntArray,
    MicroBatch,
    Preference,
    TokenColumns,
    Trajectory,
)


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
    batch.experts = _experts(rows)
    return batch


def _experts(rows: Sequence[Trajectory]) -> IntArray | None:
    """The recorded experts of all prompts, then of all responses; None where a row has none.

    A row's last token, which no model sees, gets those of the token before it.
    """
    recorded = [np.concatenate((row.experts, row.experts[-1:])) for row in rows if row.experts is not None]
    if not recorded or len(recorded) < len(rows):
        return None
    of_prompts: list[IntArray] = []
    of_responses: list[IntArray] = []
    for row, experts in zip(rows, recorded, strict=True):
        of_prompts.append(experts[: len(row.prompt.token_ids)])
        of_responses.append(experts[len(row.prompt.token_ids) :])
    return np.concatenate(of_prompts + of_responses)


def demonstrations_to_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """Rows to imitate: each a group of its own, reward 0, no token columns yet."""
    return Batch(
        prompt_ids=_head_to_tail([row.prompt_ids for row in demonstrations], np.int32),
        prompt_offsets=np.cumsum([0, *(len(row.prompt_ids) for row in demonstrations)]),
        response_ids=_head_to_tail([row.response_ids for row in demonstrations], np.int32),
        response_offsets=np.cumsum([0, *(len(row.response_ids) for row in demonstrations)]),
        loss_mask=_head_to_tail([row.loss_mask for row in demonstrations], np.bool_),
        versions=np.zeros(sum(len(row.response_ids) for row in demonstrations), dtype=np.int32),
        groups=np.arange(len(demonstrations), dtype=np.int32),
        rewards=np.zeros(len(demonstrations), dtype=np.float32),
        scored=np.ones(len(demonstrations), dtype=np.bool_),
        tokens=TokenColumns(),
    )


def pairs_to_batch(pairs: Sequence[Preference]) -> Batch:
    """Chosen and rejected answers in turn; a pair is a group where its prompts have the same tokens."""
    batch = demonstrations_to_batch([row for pair in pairs for row in (pair.chosen, pair.rejected)])
    alike = [np.array_equal(pair.chosen.prompt_ids, pair.rejected.prompt_ids) for pair in pairs]
    batch.groups[1::2] -= np.array(alike, dtype=np.int32)
    return batch


def scored_at_the_end(row: Demonstration) -> Demonstration:
    """The row with one token more, the only one in the mask: the value predicted there is computed from the whole
    answer. The token itself is never fed to a model."""
    mask = np.zeros(len(row.response_ids) + 1, dtype=np.bool_)
    mask[-1] = True
    return replace(row, response_ids=np.append(row.response_ids, np.int32(0)), loss_mask=mask)


def split_groups(batch: Batch, parts: int, seed: int | Sequence[int]) -> list[IntArray]:
    """The rows of each of at most `parts` optimizer steps: siblings are in one step, the steps have near-equal numbers
    of tokens, and `seed` decides which groups are in which step."""
    _, tokens_G = _tokens_of_groups(batch, batch.groups)
    order_G = np.random.default_rng(seed).permutation(len(tokens_G))
    return _spread(batch, batch.groups, min(parts, len(order_G)), order_G)


def balance_rows(batch: Batch, parts: int) -> list[IntArray]:
    """The rows of each of `parts` ranks: the ranks have near-equal numbers of tokens, and siblings are on one rank
    where there are at least as many groups as ranks."""
    groups_B = batch.groups if len(np.unique(batch.groups)) >= parts else np.arange(len(batch))
    _, tokens_G = _tokens_of_groups(batch, groups_B)
    return _spread(batch, groups_B, parts, np.argsort(-tokens_G, kind="stable"))


def _spread(batch: Batch, groups_B: IntArray, parts: int, order_G: IntArray) -> list[IntArray]:
    """Give each group, in the order `order_G`, to the part that has the fewest tokens so far; rows ascend in a part."""
    group_of_row_B, tokens_G = _tokens_of_groups(batch, groups_B)
    totals = np.zeros(parts)
    part_G = np.zeros(len(order_G), dtype=np.int64)
    for group in order_G:
        part_G[group] = part = int(totals.argmin())
        totals[part] += tokens_G[group]
    return [np.flatnonzero(part_G[group_of_row_B] == part) for part in range(parts)]


def _tokens_of_groups(batch: Batch, groups_B: IntArray) -> tuple[IntArray, IntArray]:
    """The number of each row's group, counted from 0, and the tokens of each group."""
    group_of_row_B = np.unique(groups_B, return_inverse=True)[1]
    lengths_B = np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets)
    return group_of_row_B, np.bincount(group_of_row_B, weights=lengths_B)


def select_rows(batch: Batch, rows: IntArray) -> Batch:
    """A batch of `rows`, every column a copy."""

    def take(values: Any, offsets: IntArray) -> Any:
        return np.concatenate([values[:0], *(values[offsets[row] : offsets[row + 1]] for row in rows)])

    prompts, responses = batch.prompt_offsets, batch.response_offsets
    experts = None
    if batch.experts is not None:
        of_prompts, of_responses = np.split(batch.experts, [int(prompts[-1])])
        experts = np.concatenate((take(of_prompts, prompts), take(of_responses, responses)))
    return Batch(
        prompt_ids=take(batch.prompt_ids, prompts),
        prompt_offsets=np.r_[0, np.diff(prompts)[rows]].cumsum(),
        response_ids=take(batch.response_ids, responses),
        response_offsets=np.r_[0, np.diff(responses)[rows]].cumsum(),
        loss_mask=take(batch.loss_mask, responses),
        versions=take(batch.versions, responses),
        groups=batch.groups[rows],
        rewards=batch.rewards[rows],
        scored=batch.scored[rows],
        tokens=batch.tokens.map(lambda column: take(column, responses)),
        experts=experts,
    )


def micro_batches(batch: Batch, rows: Sequence[int] | IntArray, tokens_per_micro_batch: int) -> list[MicroBatch]:
    """`rows` packed to at most `tokens_per_micro_batch` tokens each, siblings together; a longer row is alone.

    Scored are the response tokens that `loss_mask` names; a row without any is left out.
    """
    trainable = np.asarray(rows, dtype=np.int64)
    trainable = trainable[np.isin(trainable, batch.row_of_token[batch.loss_mask])]
    prompt_lengths_B, response_lengths_B = np.diff(batch.prompt_offsets), np.diff(batch.response_offsets)
    longest_siblings_first = np.lexsort((-response_lengths_B[trainable], batch.groups[trainable]))
    packs: list[list[int]] = []
    tokens_in_pack, group_in_pack = 0, -1
    for row in trainable[longest_siblings_first].tolist():
        prompt_length, answer_length = int(prompt_lengths_B[row]), int(response_lengths_B[row]) - 1
        cost = answer_length if batch.groups[row] == group_in_pack else prompt_length + answer_length
        if not packs or tokens_in_pack + cost > tokens_per_micro_batch:
            packs.append([])
            tokens_in_pack, cost = 0, prompt_length + answer_length
        packs[-1].append(row)
        tokens_in_pack += cost
        group_in_pack = batch.groups[row]
    return [_pack(batch, np.array(pack)) for pack in packs]


def _pack(batch: Batch, rows_R: IntArray) -> MicroBatch:
    """One micro-batch of `rows_R`, siblings next to one another.

    Each row has two slots for segments: its prompt, filled by the first row of its group alone, and its answer, which
    is the response without the last token. Of siblings with the same answer the first one's stands for all. Empty
    slots leave no segment.
    """
    row_numbers_R = np.arange(len(rows_R))
    groups_R = batch.groups[rows_R]
    starts_group_R = np.concatenate(([True], groups_R[1:] != groups_R[:-1]))
    prompt_owner_R = np.maximum.accumulate(np.where(starts_group_R, row_numbers_R, 0))
    answer_owner_R = _first_with_the_same_answer(batch, rows_R)

    prompt_starts_R, response_starts_R = batch.prompt_offsets[rows_R], batch.response_offsets[rows_R]
    response_lengths_R = batch.response_offsets[rows_R + 1] - response_starts_R
    prompt_slots_R = (batch.prompt_offsets[rows_R + 1] - prompt_starts_R) * starts_group_R
    answer_slots_R = (response_lengths_R - 1) * (answer_owner_R == row_numbers_R)
    slot_lengths = _interleave(prompt_slots_R, answer_slots_R)
    is_segment = slot_lengths > 0
    segment_of_slot = np.cumsum(is_segment) - 1
    prefixes = _interleave(np.full(len(rows_R), -1), segment_of_slot[2 * prompt_owner_R])

    # The tokens of prompts and responses as one array, and where in it each token of the micro-batch stands.
    token_ids = np.concatenate((batch.prompt_ids, batch.response_ids))
    slot_starts = _interleave(prompt_starts_R, response_starts_R + len(batch.prompt_ids))
    slot_N, place_in_slot_N = _rows_and_places(slot_lengths)
    source_N = slot_starts[slot_N] + place_in_slot_N

    # Response token i of a row is predicted at answer token i - 1: of the answer that stands for the row's own, or for
    # i = 0 at the last token of the prompt, right before the answer of the prompt's owner.
    row_T, place_T = _rows_and_places(response_lengths_R)
    scored_T = batch.loss_mask[response_starts_R[row_T] + place_T]
    row_S, place_S = row_T[scored_T], place_T[scored_T]
    source_S = response_starts_R[row_S] + place_S
    answer_begins_R = np.concatenate(([0], slot_lengths)).cumsum()[1::2]
    predicted_after_S = np.where(place_S == 0, prompt_owner_R[row_S], answer_owner_R[row_S])
    columns = batch.tokens.map(lambda column: column[source_S])
    columns.rows = row_S
    return MicroBatch(
        token_ids=token_ids[source_N],
        offsets=np.concatenate(([0], slot_lengths[is_segment])).cumsum(),
        prefixes=prefixes[is_segment],
        scored=answer_begins_R[predicted_after_S] + place_S - 1,
        targets=batch.response_ids[source_S],
        columns=columns,
        source=source_S,
        experts=None if batch.experts is None else batch.experts[source_N],
    )


def _first_with_the_same_answer(batch: Batch, rows_R: IntArray) -> IntArray:
    """int64 `[R]`: for each row the first row of its group with the same response, the last token aside."""
    starts_R, stops_R = batch.response_offsets[rows_R], batch.response_offsets[rows_R + 1] - 1
    first_rows: dict[tuple[int, bytes], int] = {}
    owners: list[int] = []
    for row, (group, start, stop) in enumerate(zip(batch.groups[rows_R].tolist(), starts_R, stops_R, strict=True)):
        answer = batch.response_ids[start:stop].tobytes()
        owners.append(first_rows.setdefault((group, answer), row))
    return np.array(owners)


def _interleave(first_R: IntArray, second_R: IntArray) -> IntArray:
    """One entry of each in turn."""
    return np.stack((first_R, second_R), axis=1).ravel()


def _rows_and_places(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """For the elements of ragged rows, head to tail: the row that each is in, and its place there."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]


def _head_to_tail(arrays: Sequence[IntArray | BoolArray | FloatArray], dtype: type[np.generic]) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
