"""What every Cluster promises: one suite, run in one process, on local processes and on Ray."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

from tandem.cluster.inline import InlineCluster
from tandem.cluster.local import LocalCluster
from tandem.controller.placed import Placed
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import Cluster, Ranks, WorkerGroup
from tandem.errors import TandemError, UserError, WorkerError, WorkerLost
from tests.cluster_workers import Probe, ProbeSpec, ragged_batch

RANKS = {"inline": 1, "local": 4, "ray": 4}


@pytest.fixture(scope="module", params=list(RANKS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


ray_by_night = pytest.mark.parametrize(
    "kind", ["inline", "local", pytest.param("ray", marks=pytest.mark.nightly)], indirect=True, scope="module"
)
"""For what costs Ray new processes, each of which imports everything, and is Ray's own work."""


@pytest.fixture(scope="module")
def cluster(kind: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if kind == "ray":
        from tandem.cluster.ray import RayCluster

        request.getfixturevalue("ray_nodes")
        made = RayCluster(timeout_s=60)
    else:
        made = InlineCluster() if kind == "inline" else LocalCluster(timeout_s=60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks(cluster: Cluster, kind: str) -> Ranks:
    return cluster.spawn(ResourcePool("main", (RANKS[kind],)))


@pytest.fixture(scope="module")
def probe(ranks: Ranks) -> WorkerGroup:
    return WorkerGroup(ranks, "probe", Probe)


def test_all_gets_the_same_arguments_and_answers_a_list(probe: WorkerGroup, ranks: Ranks) -> None:
    answers = probe.echo(1, "two", three=[3.0]).get()
    assert answers == [("probe", rank, ranks.size, (1, "two"), {"three": [3.0]}) for rank in range(ranks.size)]


def test_rank_zero_alone_answers(probe: WorkerGroup) -> None:
    assert probe.first().get() == 0


def test_ranks_are_a_world_of_torch_distributed(probe: WorkerGroup, ranks: Ranks) -> None:
    assert probe.total().get() == sum(range(1, ranks.size + 1))


def test_a_user_defined_dispatch(probe: WorkerGroup, ranks: Ranks) -> None:
    words = "one two three"
    assert probe.shout(words).get() == " ".join(words.upper().split()[: ranks.size])


@pytest.mark.parametrize("count", [0, 1, 3, 10, 101])
def test_a_list_keeps_its_order_whatever_its_length(probe: WorkerGroup, count: int) -> None:
    assert probe.squares(list(range(count))).get() == [number**2 for number in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_columns_come_back_in_the_order_of_the_batch(probe: WorkerGroup, rows: int) -> None:
    lengths = [1 + (7 * row) % 12 for row in range(rows)]
    batch = ragged_batch(lengths)
    expected = np.concatenate([row + np.arange(length) / 1000 for row, length in enumerate(lengths)])
    np.testing.assert_array_equal(probe.lengths(batch).get(), lengths)
    np.testing.assert_allclose(probe.score(batch).get(), expected, rtol=1e-6)
    metrics, tokens = probe.learn(batch, 2.0).get()
    assert metrics == {"rows": rows}
    np.testing.assert_allclose(tokens, 2 * expected, rtol=1e-6)


def test_columns_longer_than_what_travels_in_band(probe: WorkerGroup) -> None:
    lengths = [1 + (997 * row) % 2048 for row in range(300)]
    expected = np.concatenate([row + np.arange(length) / 1000 for row, length in enumerate(lengths)])
    batch = ragged_batch(lengths)
    for _ in range(3):
        np.testing.assert_allclose(probe.score(batch).get(), expected, rtol=1e-5)


def test_rows_stay_on_the_ranks(probe: WorkerGroup, ranks: Ranks) -> None:
    """They come with the first call, large columns among them; the next one names some of them."""
    batch = ragged_batch([1 + (997 * row) % 2048 for row in range(60)])
    expected = batch.row_of_token + batch.response_ids / 1000
    with Placed(batch) as placed:
        np.testing.assert_allclose(probe.score(placed.rows(fills=("values",))).get(), expected, rtol=1e-5)
        assert batch.tokens.values is not None
        rows = np.arange(1, 60, 3)
        weights = np.ones(np.diff(batch.response_offsets)[rows].sum(), np.float32)
        metrics, tokens = probe.learn(placed.rows(rows, weights=weights), 2.0).get()
        assert metrics == {"rows": len(rows)}
        wanted = np.isin(batch.row_of_token, rows)
        np.testing.assert_allclose(tokens, 2 * expected[wanted], rtol=1e-5)
        assert probe.learn(placed.rows(rows, to_controller=False), 2.0).get()[1] is None
    assert probe.total().get() == sum(range(1, ranks.size + 1)), "the ranks go on after the rows are forgotten"


def test_several_optimizer_steps_in_one_call(probe: WorkerGroup) -> None:
    batch = ragged_batch([1 + (997 * row) % 2048 for row in range(60)])
    expected = batch.row_of_token + batch.response_ids / 1000
    with Placed(batch) as placed:
        cuts = [np.arange(first, 60, 3) for first in range(3)]
        learned = probe.learn([placed.rows(rows) for rows in cuts], 2.0).get()
    for rows, (metrics, tokens) in zip(cuts, learned, strict=True):
        assert metrics == {"rows": len(rows)}
        np.testing.assert_allclose(tokens, 2 * expected[np.isin(batch.row_of_token, rows)], rtol=1e-5)


def test_a_grid_gets_its_rows_once_and_answers_once(cluster: Cluster, ranks: Ranks) -> None:
    if ranks.size < 4:
        pytest.skip("needs four ranks")
    grid = WorkerGroup(ranks, "grid", Probe, ProbeSpec({"data": 2, "tensor": 2}))
    assert grid.who(list(range(6))).get() == [0, 0, 0, 2, 2, 2]
    staged = WorkerGroup(ranks, "staged", Probe, ProbeSpec({"pipeline": 2, "data": 2}))
    assert staged.who(list(range(6))).get() == [2, 2, 2, 3, 3, 3]  # the last stage has the answer


def test_roles_of_a_pool_share_processes(ranks: Ranks, probe: WorkerGroup) -> None:
    other = WorkerGroup(ranks, "other", Probe, ProbeSpec(scale=3.0))
    assert other.process().get() == probe.process().get()
    assert probe.neighbour("other").get() == [3.0] * ranks.size
    assert other.total().get() == 3 * probe.total().get()


def test_calls_in_flight_are_answered_in_any_order(probe: WorkerGroup, ranks: Ranks) -> None:
    futures = [probe.numbers(20_000, start) for start in range(5)]
    for start in (3, 0, 4, 2, 1):
        for answer in futures[start].get():
            np.testing.assert_array_equal(answer, np.arange(start, start + 20_000))
    assert futures[3].get() is futures[3].get()


def test_answers_are_the_callers_own(probe: WorkerGroup) -> None:
    first = probe.numbers(50_000).get()
    for answer in first:
        answer += 1
    for start in range(8):
        probe.numbers(50_000, start).get()
    for answer in first:
        np.testing.assert_array_equal(answer, np.arange(1, 50_001))


def test_a_worker_may_keep_its_arguments(probe: WorkerGroup, ranks: Ranks) -> None:
    for start in range(4):
        probe.keep(np.arange(start, start + 20_000)).get()
    assert probe.kept().get() == [[sum(range(s, s + 20_000)) for s in range(4)]] * ranks.size


def test_an_entry_for_each_data_group(ranks: Ranks, probe: WorkerGroup) -> None:
    if ranks.size == 1:
        assert probe.bill({0: "a"}, 3).get() == {0: (0, "a", 3)}
        assert probe.bill({}, 3).get() == {}
        return
    grid = WorkerGroup(ranks, "each", Probe, ProbeSpec({"data": 2, "tensor": 2}))
    assert grid.bill({0: "a", 1: "b"}, 3).get() == {0: (0, "a", 3), 1: (2, "b", 3)}
    assert grid.bill({1: "b"}, price=3).get() == {1: (2, "b", 3)}
    assert grid.bill({}, 3).get() == {}


def watch_until(cluster: Cluster, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        cluster.watch()


def test_callbacks_get_the_answers_in_a_watch(cluster: Cluster, probe: WorkerGroup, ranks: Ranks) -> None:
    told: list[Any] = []
    made: list[int] = []
    first, second = probe.first(), probe.squares([1, 2, 3])

    def total(squares: list[int]) -> int:
        made.append(1)
        return sum(squares)

    first.then(lambda answer: told.append(("first", answer)))
    sums = second.map(total)
    sums.then(lambda answer: told.append(("sum", answer)))
    second.then(lambda answer: told.append(("second", answer)))
    assert told == []
    watch_until(cluster, lambda: len(told) == 3)
    assert told == [("first", 0), ("sum", 14), ("second", [1, 4, 9])]
    assert sums.get() == 14 and made == [1]

    second.then(lambda answer: told.append("late"))  # the answer is there already
    assert len(told) == 3
    cluster.watch()
    assert told[3:] == ["late"]


def test_a_callback_that_adds_one_has_it_run_in_the_next_watch(cluster: Cluster, probe: WorkerGroup) -> None:
    told: list[str] = []
    answer = probe.first()

    def outer(_: Any) -> None:
        told.append("outer")
        answer.then(lambda _: told.append("inner"))

    answer.then(outer)
    watch_until(cluster, lambda: told)
    assert told == ["outer"]
    cluster.watch()
    assert told == ["outer", "inner"]


@ray_by_night
def test_callbacks_run_while_the_controller_waits_for_another_pool(
    cluster: Cluster, tmp_path: Path, kind: str, probe: WorkerGroup
) -> None:
    """Each answer of one pool is asked for again by its callback, until, after some, the other may end."""
    end, count = tmp_path / "end", 0

    def again(_: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            end.touch()
        else:
            probe.first().then(again)

    probe.first().then(again)
    if kind == "inline":
        watch_until(cluster, end.exists)
    else:
        other = WorkerGroup(cluster.spawn(ResourcePool("waiting", (1,))), "probe", Probe)
        other.wait_for(end).get()
    assert count == 5


class Pipe:
    """A source: a message a turn, and another for each that `refill` is to send."""

    def __init__(self, refill: int = 0) -> None:
        self._theirs, self._ours = multiprocessing.Pipe()
        self._refill = refill
        self.received: list[str] = []
        self.on: Callable[[], None] = lambda: None
        self.fails = False

    def send(self) -> None:
        self._theirs.send("message")

    def connections(self) -> list[Any]:
        return [self._ours]

    def poll(self) -> None:
        if self.fails:
            raise UserError("reward.py: no such function")
        if self._ours.poll():
            self.received.append(self._ours.recv())
            if len(self.received) <= self._refill:
                self.send()
            else:
                self.on()


@contextmanager
def serving(cluster: Cluster, source: Pipe) -> Iterator[Pipe]:
    cluster.sources.append(source)
    try:
        yield source
    finally:
        cluster.sources.remove(source)


def test_sources_are_served_by_watch(cluster: Cluster) -> None:
    with serving(cluster, Pipe()) as source:
        cluster.watch(0.01)
        assert source.received == []
        Timer(0.2, source.send).start()
        watch_until(cluster, lambda: source.received)
        source.fails = True
        with pytest.raises(UserError, match=r"reward\.py"):
            cluster.watch(0.01)


@ray_by_night
def test_sources_are_served_while_the_controller_waits(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    if kind == "inline":
        pytest.skip("the controller never waits for a call")
    with serving(cluster, Pipe(refill=20)) as source:
        source.on = (tmp_path / "end").touch
        group = spawned(cluster, kind)
        source.send()
        group.wait_for(tmp_path / "end").get()
        assert len(source.received) == 21


def test_watch_without_anything_under_way_returns(cluster: Cluster, probe: WorkerGroup) -> None:
    probe.first().get()
    cluster.watch()


def test_a_callback_that_raises_does_so_in_whatever_waits(cluster: Cluster, probe: WorkerGroup) -> None:
    told: list[str] = []

    def broken(_: Any) -> None:
        raise LookupError("of the callback")

    answer = probe.first()
    answer.then(broken)
    answer.then(lambda _: told.append("after it"))
    with pytest.raises(LookupError, match="of the callback"):
        watch_until(cluster, lambda: told)
    watch_until(cluster, lambda: told)
    assert probe.first().get() == 0  # the pools go on


def test_a_callback_must_not_wait(cluster: Cluster, probe: WorkerGroup) -> None:
    probe.first().then(lambda _: cluster.watch())
    with pytest.raises(AssertionError, match="a callback or a source's poll waits"):
        watch_until(cluster, lambda: False)


def test_unregistered_methods_are_refused(probe: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"Probe\.close is not registered"):
        _ = probe.close


@ray_by_night
def test_pools_work_at_the_same_time(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    if kind == "inline":
        pytest.skip("one process does one thing at a time")
    groups = [WorkerGroup(cluster.spawn(ResourcePool(name, (2,))), "probe", Probe) for name in ("left", "right")]
    begin, between = tmp_path / "begin", tmp_path / "between"
    left = groups[0].wait_for(between)
    right = groups[1].wait_for(begin, then=between)
    Timer(0.05, begin.touch).start()
    assert len(left.get()) == len(right.get()) == 2


def spawned(cluster: Cluster, kind: str) -> WorkerGroup:
    return WorkerGroup(cluster.spawn(ResourcePool("failing", (min(2, RANKS[kind]),))), "probe", Probe)


def raised(call: Any, expected: type[TandemError]) -> str:
    with pytest.raises(expected) as error:
        call().get()
    return str(error.value)


def test_an_error_of_a_worker_tells_where_it_was_raised(cluster: Cluster, kind: str) -> None:
    if kind == "inline":
        with pytest.raises(ZeroDivisionError):
            spawned(cluster, kind).fail(0).get()
        return
    told = raised(lambda: spawned(cluster, kind).fail(1), WorkerError)
    for part in ("probe, rank 1 of 2 on ", "in fail", "ZeroDivisionError: of this rank"):
        assert part in told
    assert "cannot pickle" in raised(lambda: spawned(cluster, kind).unpicklable(), WorkerError)


@ray_by_night
def test_an_error_in_one_of_several_optimizer_steps_tells_which(cluster: Cluster, kind: str) -> None:
    if kind == "inline":
        pytest.skip("tests/unit/test_placed.py has it")
    placed = Placed(ragged_batch([1] * 8), name="training step 7")
    cuts = [placed.rows(np.array(rows)) for rows in ([0, 1], [4, 5], [2, 3], [6, 7])]
    told = raised(lambda: spawned(cluster, kind).learn(cuts, -1.0), WorkerError)
    for part in ("probe, rank ", " of 2 on ", "of this step", "in optimizer step 3 of the 4 of training step 7"):
        assert part in told, told


@ray_by_night
def test_a_failure_that_nobody_waits_for_comes_out_and_ends_all_pools(cluster: Cluster, kind: str) -> None:
    if kind == "inline":
        pytest.skip("a call raises when it is made")
    told: list[Any] = []
    waiting = WorkerGroup(cluster.spawn(ResourcePool("waiting", (1,))), "probe", Probe)
    waiting.first().get()
    answer = waiting.wait_for(Path("/nonexistent"))
    failing = spawned(cluster, kind).fail(1)
    failing.then(told.append)
    assert "ZeroDivisionError: of this rank" in raised(lambda: answer, WorkerError)
    assert "its processes have ended" in raised(waiting.first, WorkerLost)
    assert told == []


@ray_by_night
def test_the_users_mistake_comes_as_it_is(cluster: Cluster, kind: str) -> None:
    told = raised(lambda: spawned(cluster, kind).fail(0, user=True), UserError)
    assert told == "model.path: no such directory"


def test_a_process_that_dies_is_named(cluster: Cluster, kind: str) -> None:
    if kind == "inline":
        pytest.skip("the only process is ours")
    group = spawned(cluster, kind)
    told = raised(lambda: group.die(1, -9), WorkerLost)
    assert "rank 1" in told
    with pytest.raises(WorkerLost):
        group.first().get()
    assert spawned(cluster, kind).total().get() == 3.0  # the cluster goes on


@ray_by_night
def test_close_is_safe_to_repeat(kind: str, cluster: Cluster) -> None:
    spawned(cluster, kind)
    cluster.close()
    cluster.close()


@ray_by_night
def test_callbacks_of_what_has_ended_do_not_run(kind: str, cluster: Cluster) -> None:
    told: list[Any] = []
    answer = spawned(cluster, kind).first()
    answer.get()
    answer.then(told.append)
    cluster.close()
    cluster.watch()
    assert told == []
