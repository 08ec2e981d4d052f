"""Trajectories and demonstrations -> Batch -> optimizer steps -> micro-batches.

Suffixes as in `tandem.types`, and `_R`: rows of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.batching.prompt_trees import BLOCK, Path, paths_of, segments_of
from tandem.pictures.marks import PictureNumbers
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
    RatedAnswer,
    Status,
    TokenColumns,
)


def to_batch(groups: Sequence[Group], *, reads_rewards: bool = True) -> Batch:
    """The trajectories of a step, groups in order, a row a branch.

    A row whose trajectory has no score, or whose environment failed, is neither `scored` nor masked in. Where nothing
    is learned from rewards, a whole answer that no function scores is masked in all the same.
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
    demonstrations = [Demonstration(0, row.prompt_ids, row.response_ids, row.loss_mask, row.pictures) for row in rows]
    batch = demonstrations_to_batch(demonstrations, np.repeat(siblings, counts))
    batch.trajectories = np.repeat(np.arange(len(trajectories), dtype=np.int32), counts)
    batch.scored = np.repeat(np.array([reward is not None for reward in rewards], dtype=np.bool_), counts)
    values = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float32)
    batch.rewards = np.repeat(values, counts)
    learned = batch.scored if reads_rewards else batch.scored | np.repeat(_only_unscored(groups), counts)
    batch.loss_mask &= np.repeat(learned, np.diff(batch.response_offsets))
    batch.versions = _head_to_tail([row.versions for row in rows], np.int32)
    batch.tokens.rollout_logprobs = _head_to_tail([row.rollout_logprobs for row in rows], np.float32)
    weights = [score.environment_weight for group in groups for score in group.scores]
    batch.tokens.turn_rewards = _turn_rewards(rows, np.repeat(np.array(weights), counts))
    batch.experts = _experts(rows)
    return batch


def _only_unscored(groups: Sequence[Group]) -> BoolArray:
    """`[B]` of trajectories: no reward function has an opinion of it, and nothing else is wrong with it."""
    failed = (Status.ABORTED, Status.ENVIRONMENT_ERROR)
    pairs = [pair for group in groups for pair in zip(group.trajectories, group.scores, strict=True)]
    return np.array([s.failure is Status.NOT_SCORED and t.status not in failed for t, s in pairs], dtype=np.bool_)


def truncated_rows(groups: Sequence[Group]) -> BoolArray:
    """`[B]`, rows as those of `to_batch`: the trajectory was cut at a limit."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    cut = np.array([trajectory.status is Status.TRUNCATED for trajectory in trajectories], dtype=np.bool_)
    return np.repeat(cut, [len(trajectory.every_branch) for trajectory in trajectories])


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
    """The recorded experts of all prompts, then of all responses; None where a row that is trained on has none.

    A row's last token, which no model sees, gets those of the token before it; rows that no model sees get any.
    """
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    if shape is None or any(row.experts is None and row.loss_mask.any() for row in rows):
        return None
    of_prompts: list[IntArray] = []
    of_responses: list[IntArray] = []
    for row in rows:
        unseen = np.zeros((len(row.prompt_ids) + len(row.response_ids), *shape), np.int32)
        experts = unseen if row.experts is None else np.concatenate((row.experts, row.experts[-1:]))
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
    numbers = PictureNumbers()
    prompts, responses = _marked(demonstrations, numbers)
    return Batch(
        prompt_ids=_head_to_tail(prompts, np.int32),
        prompt_offsets=np.cumsum([0, *(len(row.prompt_ids) for row in demonstrations)]),
        response_ids=_head_to_tail(responses, np.int32),
        response_offsets=np.cumsum([0, *(len(row.response_ids) for row in demonstrations)]),
        loss_mask=_head_to_tail([row.loss_mask for row in demonstrations], np.bool_),
        versions=np.zeros(sum(len(row.response_ids) for row in demonstrations), dtype=np.int32),
        groups=groups,
        trajectories=np.arange(rows, dtype=np.int32),
        prompts=groups if alone else _numbers_of_prompts(prompts, groups),
        rewards=np.zeros(rows, dtype=np.float32),
        scored=np.ones(rows, dtype=np.bool_),
        tokens=TokenColumns(),
        pictures=tuple(numbers.pictures),
    )


def _marked(rows: Sequence[Demonstration], numbers: PictureNumbers) -> tuple[list[IntArray], list[IntArray]]:
    """The prompts of the rows, and their responses, with the tokens of pictures marked."""
    prompts, responses = [row.prompt_ids for row in rows], [row.response_ids for row in rows]
    for place, row in enumerate(rows):
        if row.pictures:
            marked = numbers.mark(np.concatenate((row.prompt_ids, row.response_ids)), row.pictures)
            prompts[place], responses[place] = np.split(marked, [len(row.prompt_ids)])
    return prompts, responses


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


def rated_to_batch(rows: Sequence[RatedAnswer], max_tokens: int) -> Batch:
    """Each answer, then the one of the row before (of the first row, the last one's) after the same prompt, cut where
    the two have `max_tokens` tokens; a pair is a group."""
    answers = [row.answer for row in rows]
    pairs = [
        Preference(answer, _answered_by(answer, other, max_tokens))
        for answer, other in zip(answers, answers[-1:] + answers[:-1], strict=True)
    ]
    return pairs_to_batch(pairs)


def _answered_by(row: Demonstration, other: Demonstration, max_tokens: int) -> Demonstration:
    room = max_tokens - len(row.prompt_ids)
    return replace(row, response_ids=other.response_ids[:room], loss_mask=other.loss_mask[:room])


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
    """A batch of `rows`, all of them: the batch itself. Columns are copies, or views where rows follow one another."""
    own = _as_slice(rows)
    if isinstance(own, slice) and len(rows) == len(batch):
        return batch
    prompts, responses = runs_of(batch.prompt_offsets, own), runs_of(batch.response_offsets, own)
    experts = None
    if batch.experts is not None:
        of_prompts, of_responses = np.split(batch.experts, [int(batch.prompt_offsets[-1])])
        experts = np.concatenate((take_runs(of_prompts, prompts), take_runs(of_responses, responses)))
    return Batch(
        prompt_ids=take_runs(batch.prompt_ids, prompts),
        prompt_offsets=_offsets_of(batch.prompt_offsets, own),
        response_ids=take_runs(batch.response_ids, responses),
        response_offsets=_offsets_of(batch.response_offsets, own),
        loss_mask=take_runs(batch.loss_mask, responses),
        versions=take_runs(batch.versions, responses),
        groups=batch.groups[own],
        trajectories=batch.trajectories[own],
        prompts=batch.prompts[own],
        rewards=batch.rewards[own],
        scored=batch.scored[own],
        tokens=batch.tokens.map(lambda column: take_runs(column, responses)),
        experts=experts,
        pictures=batch.pictures,
    )


def take_rows(values: Any, offsets: IntArray, rows: IntArray) -> Any:
    """The values of `rows`, head to tail: a view where each row follows the one before it, else a copy."""
    return take_runs(values, runs_of(offsets, rows))


def _as_slice(rows: IntArray) -> IntArray | slice:
    """The rows, as a slice where each follows the one before it."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
        return slice(first, last + 1)
    return rows


def runs_of(offsets: IntArray, rows: IntArray | slice) -> list[slice]:
    """Where the values of `rows` stand, with a slice for those that follow one another; at least one slice."""
    rows = rows if isinstance(rows, slice) else _as_slice(rows)
    if isinstance(rows, slice):
        return [slice(int(offsets[rows.start]), int(offsets[rows.stop]))]
    follows = rows[1:] == rows[:-1] + 1
    first, last = np.ones((2, len(rows)), dtype=np.bool_)
    first[1:] = last[:-1] = ~follows
    starts, stops = offsets[rows[first]].tolist(), offsets[rows[last] + 1].tolist()
    return list(map(slice, starts, stops))


def take_runs(values: Any, runs: Sequence[slice]) -> Any:
    """The values that stand there, head to tail: a view where there is one slice or one number for all, else a copy."""
    if len(runs) == 1:
        return values[runs[0]]
    if not any(values.strides):
        return np.broadcast_to(values[:1], sum(run.stop - run.start for run in runs))
    return np.concatenate([values[run] for run in runs])


def _offsets_of(offsets: IntArray, rows: IntArray | slice) -> IntArray:
    """Of the values of `rows`, head to tail."""
    if isinstance(rows, slice):
        return offsets[rows.start : rows.stop + 1] - offsets[rows.start]
    own = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(offsets[rows + 1] - offsets[rows], out=own[1:])
    return own


def token_shares(mask: BoolArray) -> FloatArray:
    """1 / (number of tokens in the mask) on them, 0 elsewhere, for rows of one optimizer step."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def micro_batches(
    batch: Batch,
    rows: Sequence[int] | IntArray,
    tokens_per_micro_batch: int,
    *,
    whole_trajectories: bool = False,
    prompts_once: bool = True,
) -> list[MicroBatch]:
    """`rows` packed to at most `tokens_per_micro_batch` tokens each, siblings together; a longer row is alone.

    Scored are the response tokens that `loss_mask` names; a row without any is left out. `whole_trajectories`: all
    branches of a trajectory are in one micro-batch, however long that becomes. `prompts_once`: what prompts share
    counts once; otherwise each row's prompt does, for an engine that computes it with each.
    """
    trainable = np.asarray(rows, dtype=np.int64)
    trainable = trainable[np.isin(trainable, batch.row_of_token[batch.loss_mask])]
    paths = _paths_by_prompt(batch, trainable)
    filling = _Filling(batch, paths, prompts_once)
    packs: list[list[int]] = []
    for unit in _in_packing_order(batch, trainable, whole_trajectories):
        if not packs or filling.tokens + filling.added(unit) > tokens_per_micro_batch:
            packs.append([])
            filling.begin()
        packs[-1] += unit
        filling.add(unit)
    return [_pack(batch, paths, np.array(rows)) for rows in packs]


def _paths_by_prompt(batch: Batch, rows: IntArray) -> dict[int, Path]:
    """The path of each of the rows' prompts, by its number."""
    numbers, places = np.unique(batch.prompts[rows], return_index=True)
    bounds = zip(batch.prompt_offsets[rows[places]], batch.prompt_offsets[rows[places] + 1], strict=True)
    return dict(zip(numbers.tolist(), paths_of(batch.prompt_ids[start:stop] for start, stop in bounds), strict=True))


class _Filling:
    """The tokens of a micro-batch that is being filled: each prompt, and each block that prompts share, once."""

    tokens: int

    def __init__(self, batch: Batch, paths: Mapping[int, Path], prompts_once: bool) -> None:
        self._prompts_once = prompts_once
        self._prompts = batch.prompts.tolist()
        self._prompt_lengths = np.diff(batch.prompt_offsets).tolist()
        self._answer_lengths = (np.diff(batch.response_offsets) - 1).tolist()
        self._paths = paths
        self.begin()

    def begin(self) -> None:
        """The next one."""
        self.tokens = 0
        self._has_prompts: set[int] = set()
        self._has_blocks: set[int] = set()

    def added(self, rows: Sequence[int]) -> int:
        """By how much these rows make the micro-batch longer."""
        answers = sum(self._answer_lengths[row] for row in rows)
        if not self._prompts_once:
            return answers + sum(self._prompt_lengths[row] for row in rows)
        lacking = {self._prompts[row]: self._prompt_lengths[row] for row in rows}
        lacking = {prompt: length for prompt, length in lacking.items() if prompt not in self._has_prompts}
        blocks = [number for prompt in lacking for number in self._paths[prompt]]
        known = len(blocks) - len(set(blocks) - self._has_blocks)
        return answers + sum(lacking.values()) - known * BLOCK

    def add(self, rows: Sequence[int]) -> None:
        self.tokens += self.added(rows)
        new = {self._prompts[row] for row in rows} - self._has_prompts
        self._has_prompts |= new
        self._has_blocks.update(number for prompt in new for number in self._paths[prompt])


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


def _pack(batch: Batch, paths: Mapping[int, Path], rows_R: IntArray) -> MicroBatch:
    """One micro-batch of `rows_R`.

    The segments of the prompts come first, as the tree of their `paths` has them, and then the answers, which are the
    responses without their last tokens; of rows with the same prompt and answer the first one's stands for all, and an
    empty answer leaves no segment. Those of a prompt are side by side: so attention finds the keys that answers share,
    and their queries, without gathering them.
    """
    rows_R = rows_R[np.argsort(batch.prompts[rows_R], kind="stable")]
    numbers_P, places_P, prompt_R = np.unique(batch.prompts[rows_R], return_index=True, return_inverse=True)
    starts_P, stops_P = batch.prompt_offsets[rows_R[places_P]], batch.prompt_offsets[rows_R[places_P] + 1]
    prompts = segments_of(starts_P, stops_P - starts_P, [paths[number] for number in numbers_P.tolist()])

    response_starts_R = batch.response_offsets[rows_R]
    response_lengths_R = batch.response_offsets[rows_R + 1] - response_starts_R
    answer_owner_R = _first_with_the_same_answer(batch, rows_R)
    has_segment_R = (answer_owner_R == np.arange(len(rows_R))) & (response_lengths_R > 1)
    answer_starts = response_starts_R[has_segment_R] + len(batch.prompt_ids)
    lengths = np.concatenate((prompts.lengths, response_lengths_R[has_segment_R] - 1))
    prefixes = np.concatenate((prompts.prefixes, prompts.last_P[prompt_R[has_segment_R]]))
    offsets = np.concatenate(([0], lengths.cumsum()))

    # Where each token of the micro-batch stands among all prompts' tokens and, after these, all responses'.
    segment_N, place_N = _rows_and_places(lengths)
    source_N = np.concatenate((prompts.starts, answer_starts))[segment_N] + place_N
    of_prompts, of_answers = np.split(source_N, [prompts.lengths.sum()])
    token_ids = np.concatenate((batch.prompt_ids[of_prompts], batch.response_ids[of_answers - len(batch.prompt_ids)]))

    # Response token i of a row is predicted at answer token i - 1 of the answer that stands for the row's own, or for
    # i = 0 at the last token of the prompt.
    row_T, place_T = _rows_and_places(response_lengths_R)
    predicted_T = batch.loss_mask[response_starts_R[row_T] + place_T]
    row_S, place_S = row_T[predicted_T], place_T[predicted_T]
    source_S = response_starts_R[row_S] + place_S
    prompt_ends_R = offsets[prompts.last_P[prompt_R] + 1]
    answer_begins_R = offsets[len(prompts.lengths) + has_segment_R.cumsum() - 1]
    predicted_at_S = np.where(place_S == 0, prompt_ends_R[row_S], answer_begins_R[answer_owner_R[row_S]] + place_S) - 1
    columns = batch.tokens.map(lambda column: column[source_S])
    columns.trajectories = _first_with_the_same(batch.trajectories[rows_R])[row_S]
    return MicroBatch(
        token_ids=token_ids,
        offsets=offsets,
        prefixes=prefixes,
        predicted_at=predicted_at_S,
        targets=batch.response_ids[source_S],
        columns=columns,
        source=source_S,
        experts=None if batch.experts is None else batch.experts[source_N],
        pictures=batch.pictures,
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


def _rows_and_places(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """For the elements of ragged rows, head to tail: the row that each is in, and its place there."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]


def _head_to_tail(arrays: Sequence[IntArray | BoolArray | FloatArray], dtype: type[np.generic]) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
