"""One call becomes one call a rank, and their answers one: numbers worked by hand."""

import numpy as np
import pytest

from tandem.workers.dispatch import Arguments, Dispatch, Mesh, register, registration
from tests.cluster_workers import ONE_WORD_EACH, Probe, ragged_batch


def test_data_groups_of_a_grid() -> None:
    assert Mesh({"data": 3}).data_groups() == [[0], [1], [2]]
    assert Mesh({"data": 2, "tensor": 2}).data_groups() == [[0, 1], [2, 3]]
    assert Mesh({"context": 2, "data": 2}).data_groups() == [[0, 2], [1, 3]]
    assert Mesh({"tensor": 2}).data_groups() == [[0, 1]]
    # the last pipeline stage holds the outputs, so that it speaks
    assert Mesh({"pipeline": 2, "data": 2}).data_groups() == [[2, 0], [3, 1]]
    assert Mesh({"data": 2, "pipeline": 2, "tensor": 2}).data_groups() == [[2, 3, 0, 1], [6, 7, 4, 5]]


def test_rows_go_to_every_rank_of_a_data_group() -> None:
    mesh = Mesh({"data": 2, "tensor": 2})
    calls = Dispatch.DATA_PARALLEL.distribute(mesh, Arguments((list("abcde"), 7), {"k": 1}))
    taken = [call.take() for call in calls if call]
    assert taken == [(["a", "b", "c"], 7)] * 2 + [(["d", "e"], 7)] * 2
    assert all(call and call.kwargs == {"k": 1} for call in calls)
    # all were given the same objects, which a cluster sends once
    assert len({id(call.args) for call in calls if call}) == 1


def test_a_batch_is_spread_by_tokens_and_none_is_lost() -> None:
    batch = ragged_batch([10, 1, 1, 8, 2, 1, 1], prompt=0)
    calls = Dispatch.DATA_PARALLEL.distribute(Mesh({"data": 2}), Arguments((batch,)))
    rows = [call.rows.tolist() for call in calls if call and call.rows is not None]
    assert sorted(rows[0] + rows[1]) == list(range(7))
    lengths = np.diff(batch.response_offsets)
    assert sorted(lengths[part].sum() for part in rows) == [12, 12]


def test_answers_are_joined_by_row_and_by_token() -> None:
    batch = ragged_batch([2, 3, 1])
    mesh = Mesh({"data": 2})
    calls = [Arguments((batch,), rows=np.array(rows)) for rows in ([0, 2], [1])]

    def joined(*answers: object) -> object:
        return Dispatch.DATA_PARALLEL.collect(mesh, list(calls), list(answers))

    assert joined(np.array([5, 7]), np.array([6])).tolist() == [5, 6, 7]
    assert joined(["a", "c"], ["b"]) == ["a", "b", "c"]
    tokens = joined(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 4.0]))
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5]
    pairs = joined(np.array([[1, 2], [5, 6]]), np.array([[3, 4]]))
    assert pairs.tolist() == [[1, 2], [3, 4], [5, 6]]
    metrics, rows = joined(({"loss": 1.0}, ["a", "c"]), ({"loss": 2.0}, ["b"]))
    assert (metrics, rows) == ({"loss": 1.0}, ["a", "b", "c"])
    assert joined(None, None) is None


def test_a_rank_without_rows_answers_an_empty_column() -> None:
    batch = ragged_batch([4])
    calls = Dispatch.DATA_PARALLEL.distribute(Mesh({"data": 3}), Arguments((batch,)))
    mine = [call.take()[0] for call in calls if call]
    assert sorted(len(part) for part in mine) == [0, 0, 1]
    answers = [part.response_ids.astype(np.float32) for part in mine]
    column = Dispatch.DATA_PARALLEL.collect(Mesh({"data": 3}), calls, answers)
    assert column.tolist() == [0, 1, 2, 3] and column.dtype == np.float32


def test_rows_with_one_token_each_are_not_mistaken() -> None:
    """By row and by token are the same then."""
    batch = ragged_batch([1, 1, 1])
    calls = Dispatch.DATA_PARALLEL.distribute(Mesh({"data": 2}), Arguments((batch,)))
    answers = [call.take()[0].rewards for call in calls if call]
    assert Dispatch.DATA_PARALLEL.collect(Mesh({"data": 2}), calls, answers).tolist() == [0, 1, 2]


def test_the_same_for_all_and_for_one() -> None:
    mesh, arguments = Mesh({"data": 3}), Arguments((1,), {})
    assert Dispatch.ALL.distribute(mesh, arguments) == [arguments] * 3
    assert Dispatch.ALL.collect(mesh, [arguments] * 3, [1, 2, 3]) == [1, 2, 3]
    assert Dispatch.RANK_ZERO.distribute(mesh, arguments) == [arguments, None, None]
    assert Dispatch.RANK_ZERO.collect(mesh, [arguments, None, None], [5, None, None]) == 5
    assert Dispatch.REPLICATED.distribute(mesh, arguments) == [arguments] * 3
    assert Dispatch.REPLICATED.collect(mesh, [arguments] * 3, [4, 4, 4]) == 4


def test_registration_is_inherited_and_may_be_overridden() -> None:
    class Quiet(Probe):
        def first(self) -> int:  # not marked: the base's mark stays
            return -1

        @register(Dispatch.RANK_ZERO, mesh="grid")
        def total(self) -> float:
            return 0.0

    assert registration(Quiet, "shout").dispatch is ONE_WORD_EACH
    assert registration(Quiet, "first").dispatch is Dispatch.RANK_ZERO
    assert registration(Quiet, "total").mesh == "grid"
    with pytest.raises(AttributeError, match=r"Quiet\.meshes is not registered"):
        registration(Quiet, "meshes")
