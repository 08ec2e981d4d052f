"""One call becomes one call a rank, and their answers one: numbers worked by hand."""

from typing import Any

import numpy as np
import pytest

from tandem.controller.dispatch import Split, distribute, join
from tandem.errors import WorkerError
from tandem.workers.registration import Arguments, Dispatch, Mesh, Registration, Returns, register, registration
from tests.cluster_workers import ONE_WORD_EACH, Probe, ragged_batch


def parallel(returns: Returns | tuple[Returns, ...]) -> Registration:
    return Registration(Dispatch.DATA_PARALLEL, "training", returns)


def registered(dispatch: Dispatch) -> Registration:
    return Registration(dispatch, "training", Returns.SAME)


BY_ROW, BY_TOKEN, SAME = parallel(Returns.PER_ROW), parallel(Returns.PER_TOKEN), parallel(Returns.SAME)


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
    calls, _ = distribute(BY_ROW, mesh, Arguments((list("abcde"), 7), {"k": 1}))
    taken = [call.args for call in calls.values()]
    assert taken == [(["a", "b", "c"], 7)] * 2 + [(["d", "e"], 7)] * 2
    assert list(calls) == [0, 1, 2, 3] and all(call.kwargs == {"k": 1} for call in calls.values())
    # ranks of a group were given the same object, which a cluster sends once
    assert len({id(call) for call in calls.values()}) == 2


def test_a_batch_is_spread_by_tokens_and_none_is_lost() -> None:
    batch = ragged_batch([11, 2, 2, 9, 3, 2, 2], prompt=0)
    calls, _ = distribute(BY_ROW, Mesh({"data": 2}), Arguments((batch,)))
    parts = [call.args[0] for call in calls.values()]
    assert sorted(np.concatenate([part.groups for part in parts]).tolist()) == list(range(7))
    fed = [len(part.response_ids) - len(part) for part in parts]
    assert fed == [12, 12], "a response's last token is never fed"


def test_answers_are_joined_as_the_method_says() -> None:
    split = Split([np.array([0, 2]), np.array([1])], 3, ragged_batch([2, 3, 1]).response_offsets)

    def joined(registered: Registration, *answers: object) -> Any:
        return join(registered.returns, Mesh({"data": 2}), split, dict(enumerate(answers)))

    assert joined(BY_ROW, np.array([5, 7]), np.array([6])).tolist() == [5, 6, 7]
    assert joined(BY_ROW, ["a", "c"], ["b"]) == ["a", "b", "c"]
    tokens = joined(BY_TOKEN, np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 4.0]))
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5]
    pairs = joined(BY_ROW, np.array([[1, 2], [5, 6]]), np.array([[3, 4]]))
    assert pairs.tolist() == [[1, 2], [3, 4], [5, 6]]
    both = parallel((Returns.SAME, Returns.PER_ROW))
    metrics, rows = joined(both, ({"loss": 1.0}, ["a", "c"]), ({"loss": 2.0}, ["b"]))
    assert (metrics, rows) == ({"loss": 1.0}, ["a", "b", "c"])
    assert joined(SAME, None, None) is None


def test_an_answer_of_another_length_is_refused() -> None:
    mesh = Mesh({"data": 2})
    split = Split([np.array([0, 2]), np.array([1])], 3, ragged_batch([2, 3, 1]).response_offsets)
    with pytest.raises(WorkerError, match="group 1 answered 3 entries for 1 rows"):
        join(Returns.PER_ROW, mesh, split, {0: np.zeros(2), 1: np.zeros(3)})
    with pytest.raises(WorkerError, match="group 0 answered 2 entries for 3 response tokens"):
        join(Returns.PER_TOKEN, mesh, split, {0: np.zeros(2), 1: np.zeros(3)})
    with pytest.raises(WorkerError, match="group 0 answered 5 entries for 3 response tokens"):
        distribute(BY_TOKEN, Mesh({"data": 1}), Arguments((ragged_batch([1, 2]),)))[1]({0: np.zeros(5)})


def test_a_rank_without_rows_answers_an_empty_column() -> None:
    batch = ragged_batch([4])
    calls, collect = distribute(BY_TOKEN, Mesh({"data": 3}), Arguments((batch,)))
    mine = {rank: call.args[0] for rank, call in calls.items()}
    assert sorted(len(part) for part in mine.values()) == [0, 0, 1]
    answers = {rank: part.response_ids.astype(np.float32) for rank, part in mine.items()}
    column = collect(answers)
    assert column.tolist() == [0, 1, 2, 3] and column.dtype == np.float32


def test_as_many_tokens_as_rows_are_no_rows() -> None:
    """Two rows without a token and two of two tokens: each group answers as many tokens as it has rows."""
    batch = ragged_batch([0, 2, 2, 0])
    split = Split([np.array([0, 2]), np.array([1, 3])], 4, batch.response_offsets)
    column = join(Returns.PER_TOKEN, Mesh({"data": 2}), split, {0: np.array([2, 3]), 1: np.array([0, 1])})
    assert column.tolist() == [0, 1, 2, 3]


def test_a_data_parallel_method_must_say_what_it_returns() -> None:
    with pytest.raises(TypeError, match="returns"):
        register(Dispatch.DATA_PARALLEL)
    with pytest.raises(TypeError, match="returns"):
        register(Dispatch.ALL, returns=Returns.PER_ROW)


def test_the_same_for_all_and_for_one() -> None:
    mesh, arguments = Mesh({"data": 3}), Arguments((1,), {})
    everywhere = {0: arguments, 1: arguments, 2: arguments}
    calls, collect = distribute(registered(Dispatch.ALL), mesh, arguments)
    assert calls == everywhere and collect({0: 1, 1: 2, 2: 3}) == [1, 2, 3]
    calls, collect = distribute(registered(Dispatch.RANK_ZERO), mesh, arguments)
    assert calls == {0: arguments} and collect({0: 5}) == 5
    calls, collect = distribute(registered(Dispatch.REPLICATED), mesh, arguments)
    assert calls == everywhere and collect({0: 4, 1: 4, 2: 4}) == 4


def test_each_data_group_gets_its_entry_where_it_has_one() -> None:
    """Of ranks that hold one copy of a model, the one that answers is called."""
    each = registered(Dispatch.EACH)
    mesh = Mesh({"data": 3, "tensor": 2})
    calls, collect = distribute(each, mesh, Arguments(({0: "a", 2: "c"}, 7), {"k": 1}))
    taken = {rank: (call.args, dict(call.kwargs)) for rank, call in calls.items()}
    assert taken == {0: (("a", 7), {"k": 1}), 4: (("c", 7), {"k": 1})}
    assert collect({0: "A", 4: "C"}) == {0: "A", 2: "C"}
    staged = Mesh({"pipeline": 2, "data": 2})  # the last stage answers
    calls, collect = distribute(each, staged, Arguments(({1: {}},)))
    assert calls == {3: Arguments(({},))} and collect({3: "D"}) == {1: "D"} and collect({}) == {}
    with pytest.raises(ValueError, match="an entry for data-parallel group 3, where groups are 0 to 2"):
        distribute(each, mesh, Arguments(({3: "b"},)))


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
