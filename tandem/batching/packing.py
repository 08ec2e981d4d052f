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
    Branch,
    Demonstration,
    FloatArray,
    Group,
    IntArray,
    MicroBatch,
    Preference,
    Status,
    TokenColumns,
)


def to_batch(groups: Sequence[Group]) -> Batch:
    """The trajectories of a step, groups in order, a row a branch.

    A row whose trajectory has no score, or whose environment failed, is neither `scored` nor masked in.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    branches = [trajectory.every_branch for trajectory in trajectories]
    rows = [branch for own in branches for branch in own]
    counts = [len(own) for own in branches]
    siblings = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.trajectories) for group in groups])
    rewards = [
        score.value if trajectory.status is not Status.ENVIRONMENT_ERROR else None
        for group in groups
        for trajectory, score in zip(group.trajectories, group.scores, strict=True)
    ]
    demonstrations = [Demonstration(0, row.prompt_ids, row.response_ids, row.loss_mask) for row in rows]
    batch = demonstrations_to_batch(demonstrations, np.repeat(siblings, counts))
    batch.trajectories = np.repeat(np.arange(len(trajectories), dtype=np.int32), counts)
    batch.scored = np.repeat(np.array([reward is not None for reward in rewards], dtype=np.bool_), counts)
    values = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float32)
    batch.rewards = np.repeat(values, counts)
    batch.loss_mask &= np.repeat(batch.scored, np.diff(batch.response_offsets))
    batch.versions = _head_to_tail([row.versions for row in rows], np.int32)
    batch.tokens.rollout_logprobs = _head_to_tail([row.rollout_logprobs for row in rows], np.float32)
    weights = [score.environment_weight for group in groups for score in group.scores]
    batch.tokens.turn_rewards = _turn_rewards(rows, np.repeat(np.array(weights), counts))
    batch.experts = _experts(rows)
    return batch


def _turn_rewards(rows: Sequence[Branch], weights_B: FloatArray) -> FloatArray | None:
    """The weighted reward of each turn on its last token, in the branch that trains it; None where no turn has one."""
    if all(turn.reward is None for row in rows for turn in row.turns):
        return None
    columns: list[FloatArray] = []
    for row, weight in zip(rows, weights_B.tolist(), strict=True):
        column = np.zeros(len(row.response_ids), np.float32)
        end = 0
        for turn in row.turns:
            end += turn.tokens
            if turn.reward is not None and turn.tokens and row.loss_mask[end - 1]:
                column[end - 1] = weight * turn.reward
        columns.append(column)
    return _head_to_tail(columns, np.float32)


def _experts(rows: Sequence[Branch]) -> IntArray | None:
    """The recorded experts of all prompts, then of all responses; None where a row has none.

    A row's last token, which no model sees, gets those of the token before it.
    """
    recorded = [np.concatenate((row.experts, row.experts[-1:])) for row in rows if row.experts is not None]
    if not recorded or len(recorded) < len(rows):
        return None
    of_prompts: list[IntArray] = []
    of_responses: list[IntArray] = []
    for row, experts in zip(rows, recorded, strict=True):
        of_prompts.append(experts[: len(row.prompt_ids)])
        of_responses.append(experts[len(row.prompt_ids) :])
    return np.concatenate(of_prompts + of_responses)


def demonstrations_to_batch(demonstrations: Sequence[Demonstration], groups: IntArray | None = None) -> Batch:
    """Rows to imitate: each a trajectory of its own, reward 0, no token columns yet.

    `groups`: `[B]`, rows with the same number are siblings, which share their prompt where its tokens are the same;
    default: each row is a group of its own.
    """
    rows = len(demonstrations)
    alone = groups is None
    groups = np.arange(rows, dtype=np.int32) if groups is None else groups.astype(np.int32)
    return Batch(
        prompt_ids=_head_to_tail([row.prompt_ids for row in demonstrations], np.int32),
        prompt_offsets=np.cumsum([0, *(len(row.prompt_ids) for row in demonstrations)]),
        response_ids=_head_to_tail([row.response_ids for row in demonstrations], np.int32),
        response_offsets=np.cumsum([0, *(len(row.response_ids) for row in demonstrations)]),
        loss_mask=_head_to_tail([row.loss_mask for row in demonstrations], np.bool_),
        versions=np.zeros(sum(len(row.response_ids) for row in demonstrations), dtype=np.int32),
        groups=groups,
        trajectories=np.arange(rows, dtype=np.int32),
        prompts=groups if alone else _numbers_of_prompts([row.prompt_ids for row in demonstrations], groups),
        rewards=np.zeros(rows, dtype=np.float32),
        scored=np.ones(rows, dtype=np.bool_),
        tokens=TokenColumns(),
    )


def _numbers_of_prompts(prompts: Sequence[IntArray], groups_B: IntArray) -> IntArray:
    """int32 `[B]`: one number for the rows of a group that have the same prompt tokens, in the order in which they
    come."""
    numbers: dict[tuple[int, bytes], int] = {}
    contents = (prompt.astype(np.int32, copy=False).tobytes() for prompt in prompts)
    keys = zip(groups_B.tolist(), contents, strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)


def pairs_to_batch(pairs: Sequence[Preference]) -> Batch:
    """Chosen and rejected answers in turn; a pair is a group."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    return demonstrations_to_batch(rows, np.arange(len(rows)) // 2)


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
    """The rows of each of `parts` ranks: the ranks have near-equal numbers of tokens, the branches of a trajectory are
    on one rank, and so are siblings where there are at least as many groups as ranks."""
    groups_B = batch.groups if len(np.unique(batch.groups)) >= parts else batch.trajectories
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
        trajectories=batch.trajectories[rows],
        prompts=batch.prompts[rows],
        rewards=batch.rewards[rows],
        scored=batch.scored[rows],
        tokens=batch.tokens.map(lambda column: take(column, responses)),
        experts=experts,
    )


def micro_batches(
    batch: Batch, rows: Sequence[int] | IntArray, tokens_per_micro_batch: int, *, whole_trajectories: bool = False
) -> list[MicroBatch]:
    """`rows` packed to at most `tokens_per_micro_batch` tokens each, siblings together; a longer row is alone.

    Scored are the response tokens that `loss_mask` names; a row without any is left out. `whole_trajectories`: all
    branches of a trajectory are in one micro-batch, however long that becomes.
    """
    trainable = np.asarray(rows, dtype=np.int64)
    trainable = trainable[np.isin(trainable, batch.row_of_token[batch.loss_mask])]
    prompts, lengths = batch.prompts.tolist(), np.diff(batch.prompt_offsets).tolist()
    answers = (np.diff(batch.response_offsets) - 1).tolist()
    prompts_in_pack: set[int] = set()

    def added_tokens(unit: list[int]) -> int:
        """By how much these rows make the micro-batch longer."""
        own = {prompts[row]: lengths[row] for row in unit}
        lacking = sum(length for prompt, length in own.items() if prompt not in prompts_in_pack)
        return lacking + sum(answers[row] for row in unit)

    packs: list[list[int]] = []
    tokens_in_pack = 0
    for unit in _in_packing_order(batch, trainable, whole_trajectories):
        cost = added_tokens(unit)
        if not packs or tokens_in_pack + cost > tokens_per_micro_batch:
            packs.append([])
            prompts_in_pack.clear()
            tokens_in_pack, cost = 0, added_tokens(unit)
        packs[-1] += unit
        tokens_in_pack += cost
        prompts_in_pack.update(prompts[row] for row in unit)
    tokens = np.concatenate((batch.prompt_ids, batch.response_ids))
    return [_pack(batch, tokens, np.array(pack)) for pack in packs]


def _in_packing_order(batch: Batch, rows: IntArray, whole_trajectories: bool) -> list[list[int]]:
    """The rows by their prompts, those with the longest answers first; in one list what one micro-batch must hold."""
    lengths_B = np.diff(batch.response_offsets)
    ordered = rows[np.lexsort((-lengths_B[rows], batch.prompts[rows]))]
    if not whole_trajectories:
        return [[row] for row in ordered.tolist()]
    units: dict[int, list[int]] = {}
    for row, trajectory in zip(ordered.tolist(), batch.trajectories[ordered].tolist(), strict=True):
        units.setdefault(trajectory, []).append(row)
    return list(units.values())


def _pack(batch: Batch, tokens: IntArray, rows_R: IntArray) -> MicroBatch:
    """One micro-batch of `rows_R`. `tokens`: those of all the batch's prompts, then of its responses.

    Each row has two slots for segments: its prompt, filled by the first of the rows that have it, and its answer, which
    is the response without the last token. Of rows with the same prompt and answer the first one's stands for all.
    Empty slots leave no segment.
    """
    row_numbers_R = np.arange(len(rows_R))
    prompt_owner_R = _first_with_the_same(batch.prompts[rows_R])
    owns_prompt_R = prompt_owner_R == row_numbers_R
    answer_owner_R = _first_with_the_same_answer(batch, rows_R)

    prompt_starts_R, response_starts_R = batch.prompt_offsets[rows_R], batch.response_offsets[rows_R]
    response_lengths_R = batch.response_offsets[rows_R + 1] - response_starts_R
    prompt_slots_R = (batch.prompt_offsets[rows_R + 1] - prompt_starts_R) * owns_prompt_R
    answer_slots_R = (response_lengths_R - 1) * (answer_owner_R == row_numbers_R)
    slot_lengths = _interleave(prompt_slots_R, answer_slots_R)
    is_segment = slot_lengths > 0
    segment_of_slot = np.cumsum(is_segment) - 1
    prefixes = _interleave(np.full(len(rows_R), -1), segment_of_slot[2 * prompt_owner_R])

    # Where in `tokens` each token of the micro-batch stands.
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
    columns.rows = _first_with_the_same(batch.trajectories[rows_R])[row_S]
    return MicroBatch(
        token_ids=tokens[source_N],
        offsets=np.concatenate(([0], slot_lengths[is_segment])).cumsum(),
        prefixes=prefixes[is_segment],
        scored=answer_begins_R[predicted_after_S] + place_S - 1,
        targets=batch.response_ids[source_S],
        columns=columns,
        source=source_S,
        experts=None if batch.experts is None else batch.experts[source_N],
    )


def _first_with_the_same(numbers_R: IntArray) -> IntArray:
    """int64 `[R]`: for each row the first one with its number."""
    _, first_rows, place_R = np.unique(numbers_R, return_index=True, return_inverse=True)
    return first_rows[place_R]


def _first_with_the_same_answer(batch: Batch, rows_R: IntArray) -> IntArray:
    """int64 `[R]`: for each row the first one with its prompt and its response, the last token aside."""
    starts_R, stops_R = batch.response_offsets[rows_R], batch.response_offsets[rows_R + 1] - 1
    first_rows: dict[tuple[int, bytes], int] = {}
    owners: list[int] = []
    for row, (prompt, start, stop) in enumerate(zip(batch.prompts[rows_R].tolist(), starts_R, stops_R, strict=True)):
        answer = batch.response_ids[start:stop].tobytes()
        owners.append(first_rows.setdefault((prompt, answer), row))
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
