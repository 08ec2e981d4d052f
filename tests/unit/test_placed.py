"""A batch that stays on the ranks: what travels when, what the ranks see, and that nothing stays behind."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest

from tandem.algorithms import make_algorithm
from tandem.batching.balance import BalancedPass
from tandem.batching.packing import select_rows, token_shares
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import Roles
from tandem.controller.dataflow import prepare
from tandem.controller.learning import placed_step
from tandem.controller.placed import Placed
from tandem.controller.roles import Actor, Policy
from tandem.controller.worker_groups import Future
from tandem.errors import EngineError, WorkerError, with_notes
from tandem.types import Batch, FloatArray, StepMetrics, TokenColumns
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.placed import PlacedPart
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, Returns, register
from tests.cluster_workers import ragged_batch


@dataclass
class Hosts:
    """The ranks of a pool as hosts in this process; what they are sent is pickled, and its size noted."""

    size: int
    hosts: list[WorkerHost] = field(init=False)
    sent_bytes: list[int] = field(default_factory=list[int])

    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        self.hosts = [WorkerHost(rank, self.size) for rank in range(self.size)]

    def create(self, name: str, kind: type[Worker[Any]], spec: Any) -> dict[str, Mesh]:
        return [*(host.create(name, kind, spec) for host in self.hosts)].pop()

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        messages = {rank: pickle.dumps(arguments) for rank, arguments in calls.items()}
        self.sent_bytes.append(sum(map(len, messages.values())))
        answers = {rank: self.hosts[rank].call(name, method, pickle.loads(x)) for rank, x in messages.items()}
        return Future(lambda: answers, notify=[].append)

    def close(self) -> None:
        """Nothing is open."""


class Model(Worker[None]):
    """Scores each token by its row and place, and keeps the batches that it is given."""

    seen: list[Batch]

    @register(Dispatch.DATA_PARALLEL, returns=Returns.PER_TOKEN)
    def logprobs(self, batch: Batch) -> FloatArray:
        self.seen = [*getattr(self, "seen", []), batch]
        return (batch.rewards[batch.row_of_token] + batch.response_ids / 1000).astype(np.float32)

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.PER_TOKEN, Returns.PER_TOKEN))
    def token_statistics(self, batch: Batch) -> tuple[FloatArray, FloatArray]:
        return self.logprobs(batch), np.full(len(batch.response_ids), 0.5, np.float32)

    @register(Dispatch.DATA_PARALLEL, returns=(Returns.SAME, Returns.PER_TOKEN))
    def learn(self, batch: Batch, loss: Any) -> tuple[StepMetrics, FloatArray]:
        if isinstance(loss, Exception) and 3 in batch.rewards:
            raise loss
        return {"loss": 1.0}, self.logprobs(batch)


LOSS: Any = None
LENGTHS = [3, 1, 4, 2, 6, 5, 2, 3]


def world(size: int) -> tuple[Hosts, Actor, Policy]:
    ranks, kind = Hosts(size), Model
    return ranks, Actor(ranks, "actor", kind), Policy(ranks, "reference", kind)  # pyright: ignore[reportArgumentType]


def model(ranks: Hosts, rank: int, name: str = "actor") -> Model:
    found = ranks.hosts[rank].workers[name]
    assert isinstance(found, Model)
    return found


def expected(batch: Batch) -> FloatArray:
    return (batch.rewards[batch.row_of_token] + batch.response_ids / 1000).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_are_filled_here_and_there_in_the_order_of_the_batch(size: int) -> None:
    ranks, actor, reference = world(size)
    batch = ragged_batch(LENGTHS)
    with Placed(batch) as placed:
        column = actor.logprobs(placed.rows(fills=("old_logprobs",))).get()
        np.testing.assert_array_equal(column, expected(batch))
        assert batch.tokens.old_logprobs is column
        reference.logprobs(placed.rows(fills=("ref_logprobs",))).get()
        for rank in range(size):
            seen = model(ranks, rank, "reference").seen[0]
            np.testing.assert_array_equal(seen.tokens.old_logprobs, expected(seen))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_the_first_epoch_stand_together_on_the_ranks(size: int) -> None:
    """Its optimizer steps are views there, later ones copies; answers are in the order of the batch."""
    ranks, actor, _ = world(size)
    batch = ragged_batch(LENGTHS)
    first, second = [np.array([1, 3, 4, 7]), np.array([0, 2, 5, 6])], [np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])]
    passes = [BalancedPass(np.arange(8)), *(BalancedPass(rows, 3.0) for rows in first + second)]
    with Placed(batch, passes) as placed:
        np.testing.assert_array_equal(actor.logprobs(placed.rows(fills=("old_logprobs",))).get(), expected(batch))
        learned = actor.learn_steps([placed.rows(rows) for rows in first + second], LOSS).get()
    for rows, (_, column) in zip(first + second, learned, strict=True):
        np.testing.assert_array_equal(column, expected(select_rows(batch, rows)))
    for rank in range(size):
        held, *selections = model(ranks, rank).seen
        for selection in selections:
            np.testing.assert_array_equal(selection.tokens.old_logprobs, expected(selection))
        shared = [
            np.shares_memory(held.response_ids, selection.response_ids) for selection in selections if len(selection)
        ]
        assert size == 1 or all(shared[:2])


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_optimizer_steps_are_cut_by_index(size: int, by_row: bool) -> None:
    """Ranks see the rows of a step, with what they weigh and the columns that came since; together all of them."""
    ranks, actor, _ = world(size)
    batch, rows = ragged_batch(LENGTHS), np.array([0, 3, 4, 7])
    wanted = select_rows(batch, rows)
    lengths = np.diff(wanted.response_offsets)
    weights = np.repeat([1, 2, 0, 4], lengths) if by_row else np.arange(lengths.sum())
    weights = weights.astype(np.float32)
    with Placed(batch) as placed:
        actor.logprobs(placed.rows(fills=("old_logprobs",))).get()
        batch.tokens.advantages = np.arange(len(batch.response_ids), dtype=np.float32)
        metrics, column = actor.learn(placed.rows(rows, weights=weights), LOSS).get()
        assert metrics == {"loss": 1.0}
        np.testing.assert_array_equal(column, expected(wanted))
        whole = placed.rows(rows, weights=weights).whole()
    parts = [model(ranks, rank).seen[1] for rank in range(size)]
    order = np.argsort(np.concatenate([part.groups for part in parts]))
    assert np.concatenate([part.groups for part in parts])[order].tolist() == rows.tolist()
    for part in parts:
        own = select_rows(whole, np.flatnonzero(np.isin(whole.groups, part.groups)))
        for name in (one.name for one in fields(TokenColumns)):
            np.testing.assert_array_equal(getattr(part.tokens, name), getattr(own.tokens, name), err_msg=name)
        np.testing.assert_array_equal(part.response_ids, own.response_ids)
    np.testing.assert_array_equal(whole.tokens.shares, token_shares(wanted.loss_mask))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_call_makes_all_optimizer_steps(size: int) -> None:
    """Each as a call of its own would: the same rows, weights and columns, and an answer a step. The column that the
    first step's answer brings is for the controller alone."""
    batch, selections = ragged_batch(LENGTHS), [np.array([0, 3, 4, 7]), np.array([1, 2, 5, 6]), np.arange(8)]
    lengths = np.diff(batch.response_offsets)
    seen: list[list[list[Batch]]] = []
    for in_one_call in (True, False):
        ranks, actor, _ = world(size)
        with Placed(batch) as placed:
            weights = [np.arange(lengths[rows].sum(), dtype=np.float32) for rows in selections]
            weights[1] = np.repeat(np.arange(4, dtype=np.float32), lengths[selections[1]])
            each = list(zip(selections, weights, [True, False, False], strict=True))
            steps = [placed.rows(rows, weights=own, to_controller=answers) for rows, own, answers in each]
            if in_one_call:
                learned = actor.learn_steps(steps, LOSS).get()
                assert len(ranks.sent_bytes) == 1
            else:
                learned = [actor.learn(rows, LOSS).get() for rows in steps]
        assert [metrics for metrics, _ in learned] == [{"loss": 1.0}] * 3
        np.testing.assert_array_equal(learned[0][1], expected(select_rows(batch, selections[0])))
        assert learned[1][1] is None and learned[2][1] is None
        seen.append([model(ranks, rank).seen for rank in range(size)])
    for together, apart in zip(*seen, strict=True):
        assert len(together) == len(apart) == 3
        for own, other in zip(together, apart, strict=True):
            np.testing.assert_array_equal(own.trajectories, other.trajectories)
            for name in (one.name for one in fields(TokenColumns)):
                np.testing.assert_array_equal(getattr(own.tokens, name), getattr(other.tokens, name), err_msg=name)


def test_a_failure_names_the_optimizer_step() -> None:
    """Row 3 is in the third."""
    _, actor, _ = world(1)
    placed = Placed(ragged_batch(LENGTHS), name="training step 7")
    steps = [placed.rows(rows) for rows in np.array([[0, 1], [4, 5], [2, 3], [6, 7]])]
    failure: Any = EngineError("of this rank")
    with pytest.raises(EngineError) as raised:
        actor.learn_steps(steps, failure)
    found = pickle.loads(pickle.dumps(raised.value))
    assert with_notes(found) == "of this rank\nin optimizer step 3 of the 4 of training step 7"


@pytest.mark.parametrize("newest", [0, 3])
def test_a_rank_sees_the_version_of_each_token(newest: int) -> None:
    """Also where it is one number that travels, and where a rank cuts its rows."""
    ranks, actor, _ = world(2)
    batch = ragged_batch(LENGTHS)
    batch.versions = np.linspace(0, newest, len(batch.response_ids)).astype(np.int32)
    rows = np.array([0, 2, 3, 5, 7])
    with Placed(batch) as placed:
        actor.learn(placed.rows(rows, weights=np.ones(np.diff(batch.response_offsets)[rows].sum(), np.float32)), LOSS)
    parts = [model(ranks, rank).seen[0] for rank in range(2)]
    for part in parts:
        own = select_rows(batch, np.flatnonzero(np.isin(batch.groups, part.groups)))
        np.testing.assert_array_equal(part.versions, own.versions)
    assert sorted(np.concatenate([part.groups for part in parts]).tolist()) == rows.tolist()


@pytest.mark.parametrize("lengths", [[2, 0], [0, 3, 0], [2, 0, 1, 2, 1, 0]])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_with_empty_answers_there_may_be_as_many_rows_as_tokens(size: int, by_row: bool, lengths: list[int]) -> None:
    """Of a conversation that failed before its first turn nothing is there; the critic's step has the row."""
    ranks, actor, _ = world(size)
    batch = ragged_batch(lengths)
    weights = np.repeat(np.arange(1, 1 + len(lengths)), lengths) if by_row else np.arange(1, 1 + sum(lengths))
    with Placed(batch) as placed:
        rows = placed.rows(np.arange(len(lengths)), weights=weights.astype(np.float32))
        actor.learn(rows, LOSS).get()
    seen = [model(ranks, rank).seen[0] for rank in range(size)]
    own = [select_rows(rows.whole(), np.flatnonzero(np.isin(batch.groups, part.groups))) for part in seen]
    for found, wanted in zip(seen, own, strict=True):
        np.testing.assert_array_equal(found.tokens.loss_weights, wanted.tokens.loss_weights)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 2], [0, 3]])
@pytest.mark.parametrize("trained", [True, False])
def test_weights_are_those_that_were_given_however_they_travel(trained: bool, rows: list[int]) -> None:
    """Alike, alike in each row, alike where tokens are trained, each of its own; also where one is not trained."""
    batch = ragged_batch([3, 1, 2, 4])
    batch.loss_mask[:] = True
    batch.loss_mask[batch.response_offsets[:-1]] = trained
    wanted = select_rows(batch, np.array(rows))
    lengths, mask = np.diff(wanted.response_offsets), wanted.loss_mask
    by_row = np.repeat(np.arange(1, 1 + len(rows)), lengths)
    for weights in (np.ones(len(mask)), 2 * mask, by_row, by_row * mask, np.arange(len(mask)), np.zeros(len(mask))):
        with Placed(batch) as placed:
            given = weights.astype(np.float32)
            whole = placed.rows(np.array(rows), weights=given).whole()
        np.testing.assert_array_equal(whole.tokens.loss_weights, given)


def test_what_a_rank_has_does_not_travel_again() -> None:
    ranks, actor, reference = world(2)
    batch = ragged_batch([2000] * 8)
    tokens = len(batch.response_ids)
    batch.tokens.old_logprobs = batch.tokens.rollout_logprobs  # the same column goes by its name
    with Placed(batch) as placed:
        actor.logprobs(placed.rows()).get()
        reference.logprobs(placed.rows(fills=("ref_logprobs",))).get()
        batch.tokens.advantages = np.zeros(tokens, np.float32)
        all_rows = placed.rows(np.arange(8), weights=np.ones(tokens, np.float32), to_controller=False)
        _, nothing = actor.learn(all_rows, LOSS).get()
        assert nothing is None
        uneven = np.arange(tokens // 2, dtype=np.float32)
        actor.learn(placed.rows(np.arange(4), weights=uneven), LOSS).get()
    first, second, third, fourth, last = ranks.sent_bytes
    assert 9 * tokens < first < 9.5 * tokens, "ids, the engine's log-probs and the mask; one version for all"
    assert second < 2000
    assert 4 * tokens < third < 4.5 * tokens, "advantages; each row's tokens weigh the same"
    assert 2 * tokens < fourth < 2.5 * tokens, "the weights of half of the rows"
    assert last < 1000
    with pytest.raises(WorkerError, match="placed in another process than this, or are forgotten"):
        part = PlacedPart(placed.holder(ranks, Mesh({"data": 2}), lambda _: None).key)
        ranks.hosts[0].call("actor", "logprobs", Arguments((part,)))


def settings(**algorithm: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts_per_step": 4},
            "algorithm": {"type": "grpo", "group_size": 2, **algorithm},
            "trainer": {"run_dir": "r", "steps": 1},
        }
    )


def test_log_probs_and_squared_probabilities_take_one_pass() -> None:
    ranks, actor, _ = world(1)
    config, batch = settings(type="otb"), ragged_batch(LENGTHS)
    algorithm = make_algorithm(config.algorithm, 8)
    experience: Any = None
    with placed_step(batch, algorithm, config, 1) as placed:
        prepare(Roles(experience, actor), algorithm, placed)
    assert len(model(ranks, 0).seen) == 1
    np.testing.assert_array_equal(batch.tokens.old_logprobs, expected(batch))
    assert batch.tokens.squared_probs is not None and (batch.tokens.squared_probs == 0.5).all()
