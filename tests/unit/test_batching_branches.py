"""Rows of a batch: which share a prompt, which are siblings, and which are branches of one trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.algorithms.supervised import NextTokenLoss
from tandem.batching.balance import balance_rows
from tandem.batching.packing import (
    demonstrations_to_batch,
    micro_batches,
    pairs_to_batch,
    select_rows,
    split_groups,
    to_batch,
    token_shares,
)
from tandem.types import Batch, Branch, Demonstration, Group, MicroBatch, Preference, Prompt, Score, Status, Trajectory
from tests.unit.test_training_fsdp import engine_of, model_of


def branch(prompt: list[int], response: list[int], mask: list[bool] | None = None) -> Branch:
    return Branch(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=np.array(mask if mask is not None else [True] * len(response), np.bool_),
        rollout_logprobs=-np.array(response, np.float32),
        versions=np.zeros(len(response), np.int32),
    )


def trajectory(first: Branch, *others: Branch, status: Status = Status.COMPLETED) -> Trajectory:
    return Trajectory(
        prompt=Prompt(0, first.prompt_ids, "", "source", None),
        sample=0,
        response_ids=first.response_ids,
        loss_mask=first.loss_mask,
        rollout_logprobs=first.rollout_logprobs,
        versions=first.versions,
        text="",
        status=status,
        branches=others,
    )


def seen(part: MicroBatch) -> list[tuple[list[int], int]]:
    """For each scored token: all tokens that its prediction is computed from, and the token itself."""
    bounds, found = part.offsets, []
    for place, target in zip(part.predicted_at.tolist(), part.targets.tolist(), strict=True):
        segment = int(np.searchsorted(bounds, place, side="right")) - 1
        prefix = int(part.prefixes[segment])
        before = part.token_ids[bounds[prefix] : bounds[prefix + 1]].tolist() if prefix >= 0 else []
        found.append((before + part.token_ids[bounds[segment] : place + 1].tolist(), target))
    return found


def contexts(batch: Batch) -> list[tuple[list[int], int]]:
    """The same, for all tokens in the loss mask, from the rows."""
    found: list[tuple[list[int], int]] = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]].tolist()
        start, stop = batch.response_offsets[row : row + 2].tolist()
        response = batch.response_ids[start:stop].tolist()
        found += [(prompt + response[:place], response[place]) for place in np.flatnonzero(batch.loss_mask[start:stop])]
    return found


@pytest.fixture
def conversations() -> Batch:
    """Two siblings with prompts of their own, of which the second one has three branches, two of these with one prompt;
    a lost trajectory of two branches; and one alone."""
    lost = trajectory(branch([8], [9]), branch([8, 9], [10, 11]))
    many = trajectory(
        branch([7, 8, 9, 9], [12, 13]), branch([7, 8, 9, 9], [12, 14, 15], [False, True, True]), branch([7, 8], [16])
    )
    return to_batch(
        [
            Group([trajectory(branch([1, 2, 3], [10, 11])), many], [Score(1.0), Score(0.5)]),
            Group([lost, trajectory(branch([8], [9, 10]))], [Score(None, failure=Status.REWARD_ERROR), Score(2.0)]),
        ]
    )


def test_a_row_is_a_branch(conversations: Batch) -> None:
    assert conversations.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert conversations.trajectories.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert conversations.prompts.tolist() == [0, 1, 1, 2, 3, 4, 3]
    assert conversations.rewards.tolist() == [1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 2.0]
    assert conversations.scored.tolist() == [True] * 4 + [False, False, True]
    assert conversations.first_branches.tolist() == [0, 1, 4, 6]
    assert conversations.row_of_token.tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6, 6]
    assert conversations.trajectory_of_token.tolist() == [0, 0, *[1] * 6, 2, 2, 2, 3, 3]
    assert not conversations.loss_mask[conversations.trajectory_of_token == 2].any()


@pytest.mark.parametrize("tokens", [1, 7, 11, 1000])
@pytest.mark.parametrize("whole", [False, True])
def test_every_token_is_trained_on_its_own_context(conversations: Batch, tokens: int, whole: bool) -> None:
    """Siblings whose prompts differ, too: no row gets another row's prompt."""
    parts = micro_batches(conversations, range(len(conversations)), tokens, whole_trajectories=whole)
    assert sorted(pair for part in parts for pair in seen(part)) == sorted(contexts(conversations))


def test_a_prompt_is_computed_once_for_all_rows_of_a_group_that_have_it(conversations: Batch) -> None:
    (part,) = micro_batches(conversations, range(7), 1000)
    assert part.token_ids.tolist() == [1, 2, 3, 7, 8, 9, 9, 7, 8, 8, 10, 12, 14, 12, 9]
    assert part.prefixes.tolist() == [-1, -1, -1, -1, 0, 1, 1, 3]


def test_a_whole_trajectory_is_in_one_micro_batch_where_the_loss_asks_for_that(conversations: Batch) -> None:
    apart = micro_batches(conversations, range(7), 1)
    assert len(apart) == 5
    whole = micro_batches(conversations, range(7), 1, whole_trajectories=True)
    assert [np.unique(conversations.trajectory_of_token[part.source]).tolist() for part in whole] == [[0], [1], [3]]
    for part in whole:
        assert part.columns.trajectories is not None and len(np.unique(part.columns.trajectories)) == 1


def test_branches_are_in_one_step_and_on_one_rank(conversations: Batch) -> None:
    for parts in (1, 2, 3, 4):
        for cut in (split_groups(conversations, parts, seed=1), balance_rows(conversations, parts)):
            assert sorted(np.concatenate(cut).tolist()) == list(range(7))
            own = [set(conversations.trajectories[rows].tolist()) for rows in cut]
            assert sum(map(len, own)) == 4, "each trajectory is in one part"
    assert sorted(len(rows) for rows in balance_rows(conversations, 4)) == [1, 1, 2, 3]


def test_selected_rows_keep_what_they_share(conversations: Batch) -> None:
    part = select_rows(conversations, np.array([6, 2, 1, 3]))
    assert part.groups.tolist() == [1, 0, 0, 0] and part.trajectories.tolist() == [3, 1, 1, 1]
    assert part.prompts.tolist() == [3, 1, 1, 2]
    (packed,) = micro_batches(part, range(4), 1000, whole_trajectories=True)
    assert sorted(seen(packed)) == sorted(contexts(part))


def test_a_trajectory_whose_environment_failed_is_masked_out_whatever_its_score() -> None:
    failed = trajectory(branch([1], [2, 3]), status=Status.ENVIRONMENT_ERROR)
    batch = to_batch([Group([failed, trajectory(branch([1], [4]))], [Score(0.0), Score(1.0)])])
    assert batch.scored.tolist() == [False, True] and batch.loss_mask.tolist() == [False, False, True]


def test_a_pair_is_a_group_and_shares_its_prompt_where_that_is_the_same() -> None:
    def row(prompt: list[int], response: list[int]) -> Demonstration:
        return Demonstration(0, np.array(prompt), np.array(response), np.ones(len(response), np.bool_))

    alike, apart = (row([1], [2, 3]), row([1], [4])), (row([1, 5], [2, 3]), row([1, 6], [4]))
    batch = pairs_to_batch([Preference(*alike), Preference(*apart)])
    assert batch.groups.tolist() == [0, 0, 1, 1] and batch.trajectories.tolist() == [0, 1, 2, 3]
    assert batch.prompts.tolist() == [0, 0, 1, 2]
    (packed,) = micro_batches(batch, range(4), 1000)
    assert packed.prefixes.tolist().count(-1) == 3
    assert sorted(seen(packed)) == sorted(contexts(batch))


def test_loss_and_gradients_of_siblings_with_prompts_of_their_own_are_those_of_each_row_alone() -> None:
    """Against a forward pass of plain transformers for each row."""
    random = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return random.integers(0, 20, length).tolist()

    shared = ids(5)
    siblings = [
        trajectory(branch(shared, ids(4)), branch(shared + ids(3), ids(6), [False, True] * 3), branch(shared, ids(2))),
        trajectory(branch(ids(7), ids(3))),
        trajectory(branch(shared, ids(5))),
    ]
    batch = to_batch([Group(siblings, [Score(1.0)] * 3)])
    batch.tokens.loss_weights = batch.tokens.shares = token_shares(batch.loss_mask)
    model, plain = model_of("Qwen2"), model_of("Qwen2", "eager")
    plain.load_state_dict(model.state_dict())
    loss = torch.zeros(())
    for context, target in contexts(batch):
        logits = plain(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        loss = loss - torch.log_softmax(logits, -1)[target] / int(batch.loss_mask.sum())
    loss.backward()
    wanted: dict[str, Any] = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for tokens in (1, 12, 1000):
        for whole in (False, True):
            engine = engine_of(model)
            parts = micro_batches(batch, range(len(batch)), tokens, whole_trajectories=whole)
            assert engine.forward_backward(parts, NextTokenLoss()).loss == pytest.approx(loss.item(), rel=1e-5)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=2e-6)
            model.zero_grad()


def test_demonstrations_share_nothing() -> None:
    row = Demonstration(0, np.array([1, 2]), np.array([3]), np.array([True]))
    batch = demonstrations_to_batch([row, row])
    assert batch.groups.tolist() == batch.prompts.tolist() == batch.trajectories.tolist() == [0, 1]
