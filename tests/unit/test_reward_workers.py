"""Reward workers: hanging and dying calls cost their own reward and nothing else, and no process stays behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tandem.errors import TandemError, UserError
from tandem.reward.functions import RewardCall
from tandem.reward.workers import WorkerPool
from tandem.types import Score, Status

SAMPLES = Path(__file__).with_name("reward_samples.py")
F, G, DRAW = (f"{SAMPLES}:{name}" for name in ("f", "g", "draw"))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool({F: {}, G: {}, DRAW: {}}, count=2, timeout_s=0.5)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[WorkerPool]:
    """Its processes have time to start again, on a busy machine too."""
    pool = WorkerPool({F: {}}, count=2, timeout_s=20.0)
    yield pool
    pool.close()


def call(completion: str, row: int = 0, reference: str = F) -> RewardCall:
    return RewardCall(reference, row, [pickle.dumps({})], [completion])


def run(pool: WorkerPool, calls: list[RewardCall]) -> list[Score]:
    pool.run(calls)
    return [call.scores[0] for call in calls]


def outcomes(pool: WorkerPool, completions: list[str], reference: str = F) -> list[object]:
    """The value of each call, or the last line of its failure."""
    results = run(pool, [call(c, row, reference) for row, c in enumerate(completions)])
    return [score.error.splitlines()[-1] if score.error else score.value for score in results]


def turn_until(pool: WorkerPool, is_enough: Callable[[], object]) -> None:
    while not is_enough():
        wait(pool.connections(), 1)
        pool.poll()


def processes_of(session: int) -> list[int]:
    """What lives in a session (a worker has one of its own); zombies do not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            found += [int(stat.parent.name)] if int(its_session) == session and state != "Z" else []
    return found


def gone(session: int) -> bool:
    """Soon: what is killed takes a moment to die."""
    deadline = time.monotonic() + 10
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not processes_of(session)


def test_results_come_in_order_whatever_is_printed(pool: WorkerPool) -> None:
    assert outcomes(pool, [str(i) for i in range(300)]) == [float(i) for i in range(300)]


def test_large_results_pass(pool: WorkerPool) -> None:
    results = run(pool, [call("big", row) for row in range(4)])
    assert [len(score.prediction or "") for score in results] == [1_000_000] * 4


def test_one_in_ten_raises(pool: WorkerPool) -> None:
    found = outcomes(pool, ["raise" if row % 10 == 3 else "1" for row in range(100)])
    assert found == ["ValueError: no reward for this one" if row % 10 == 3 else 1.0 for row in range(100)]


def test_a_call_that_hangs_times_out_and_its_chunk_is_kept(pool: WorkerPool) -> None:
    results = run(pool, [call("hang" if row == 5 else "1", row) for row in range(20)])
    assert [score.value for score in results] == [None if row == 5 else 1.0 for row in range(20)]
    assert results[5].failure is Status.REWARD_TIMEOUT
    assert "took longer than reward.timeout_s = 0.5 s" in str(results[5].error)


def test_async_calls_time_out_too(pool: WorkerPool) -> None:
    results = run(pool, [call("hang" if row == 1 else "1", row, G) for row in range(4)])
    assert [score.value for score in results] == [2.0, None, 2.0, 2.0]
    assert results[1].failure is Status.REWARD_TIMEOUT


@pytest.mark.parametrize(
    ("deed", "what"),
    [("exit", "ended with exit status 3"), ("kill", "was killed by signal 9"), ("leave a child and exit", "status 4")],
)
def test_a_call_that_ends_its_process_is_to_blame_alone(patient_pool: WorkerPool, deed: str, what: str) -> None:
    found = outcomes(patient_pool, [deed if row in (0, 7) else str(row) for row in range(12)])
    assert [row for row, value in enumerate(found) if value != float(row)] == [0, 7]
    assert what in str(found[0]) and what in str(found[7])


def test_random_numbers_follow_the_seed_not_the_worker(pool: WorkerPool) -> None:
    alone = outcomes(pool, ["x"] * 8, DRAW)
    after_others = run(pool, [call("1", 90), call("hang", 91), *(call("x", row, DRAW) for row in range(8))])
    assert [score.value for score in after_others[2:]] == alone
    assert len(set(alone)) == 8


def test_what_a_call_started_dies_with_it_and_close_ends_all() -> None:
    pool = WorkerPool({F: {}, G: {}, DRAW: {}}, count=1, timeout_s=0.5)
    (worker,) = outcomes(pool, ["pid"])
    assert isinstance(worker, float) and processes_of(int(worker)) == [int(worker)]
    assert "took longer" in str(outcomes(pool, ["hang with a child"]))
    assert gone(int(worker))
    (successor,) = outcomes(pool, ["pid"])
    assert isinstance(successor, float) and successor != worker
    pool.close()
    pool.close()
    assert gone(int(successor))


def test_an_idle_worker_that_was_killed_is_replaced_and_nobody_blamed() -> None:
    pool = WorkerPool({F: {}, G: {}, DRAW: {}}, count=1, timeout_s=5)
    (worker,) = outcomes(pool, ["pid"])
    assert isinstance(worker, float)
    os.kill(int(worker), signal.SIGKILL)
    assert gone(int(worker))
    assert outcomes(pool, ["1", "2"]) == [1.0, 2.0]
    pool.close()


def test_workers_that_cannot_start_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    pool = WorkerPool({F: {}, G: {}, DRAW: {}}, count=1, timeout_s=0.5)
    with pytest.raises(TandemError, match="ended with exit status 1 before any call"):
        pool.run([call("1")])
    pool.close()


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        (
            "time.sleep(3600)",
            "slow.py for its function f takes a reward worker longer than reward.import_timeout_s = 0.2 s",
        ),
        ("os._exit(5)", r"slow.py:f'(.|\n)*slow.py, line 2\) called os._exit\(5\)"),
        ("raise KeyError", r"slow.py:f'(.|\n)*KeyError"),
        ("os.kill(os.getpid(), 9)", "slow.py for its function f: a reward worker was killed by signal 9"),
    ],
)
def test_a_file_that_no_worker_gets_through_is_named(tmp_path: Path, deed: str, told: str) -> None:
    """The controller has imported it without trouble."""
    (tmp_path / "slow.py").write_text(f"import os, time\n{deed}\ndef f(completion):\n    return 1.0\n")
    pool = WorkerPool({f"{tmp_path}/slow.py:f": {}}, count=1, timeout_s=60.0, import_timeout_s=0.2)
    with pytest.raises(TandemError if "kill" in deed else UserError, match=told):
        pool.run([call("1", reference=f"{tmp_path}/slow.py:f")])
    pool.close()


def test_each_batch_is_done_in_a_later_turn_and_an_empty_one_too(pool: WorkerPool) -> None:
    assert not pool.connections()
    batches = [[call(str(row)) for row in range(8 * number)] for number in range(5)]
    done: list[int] = []
    for number, calls in enumerate(batches):
        pool.add(calls, lambda number=number: done.append(number))
    assert not done and wait(pool.connections(), 0)
    turn_until(pool, lambda: len(done) == 5)
    assert sorted(done) == [0, 1, 2, 3, 4] and not pool.connections()
    values = [[call.scores[0].value for call in calls] for calls in batches]
    assert values == [[float(row) for row in range(8 * number)] for number in range(5)]


def test_what_is_forgotten_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A call that runs ends, for nobody; those that wait are not made. What is added afterwards is scored."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def slow(completion):\n"
        f"    log = pathlib.Path({str(tmp_path / 'log')!r}).open('a')\n"
        "    print(completion, file=log, flush=True)\n"
        "    while completion == 'runs' and not pathlib.Path(log.name).with_name('go').exists():\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    reference, done = f"{tmp_path}/slow.py:slow", list[str]()
    pool = WorkerPool({reference: {}}, count=1, timeout_s=60.0)
    for completion in ("runs", "waits", "waits, too"):
        pool.add([call(completion, reference=reference)], lambda: done.append("of the past"))
    turn_until(pool, (tmp_path / "log").exists)
    pool.add([], lambda: done.append("of the past"))
    pool.forget()
    pool.add([call("new", reference=reference)], lambda: done.append("new"))
    (tmp_path / "go").touch()
    turn_until(pool, lambda: done)
    assert done == ["new"] and (tmp_path / "log").read_text() == "runs\nnew\n"
    assert not pool.connections()
    pool.close()


def test_a_batch_added_by_another_that_is_done_is_scored(pool: WorkerPool) -> None:
    first, second, nested = [call("1")], [call("2")], [call("3")]
    done: list[str] = []

    def add_second() -> None:
        pool.add(second, lambda: done.append("second"))
        pool.add([], lambda: done.append("empty"))
        pool.run(nested)
        done.append("first")

    pool.add(first, add_second)
    turn_until(pool, lambda: len(done) == 3)
    assert set(done) == {"first", "second", "empty"}
    assert [calls[0].scores[0].value for calls in (first, second, nested)] == [1.0, 2.0, 3.0]


def test_a_call_that_hangs_keeps_one_worker_and_close_ends_it() -> None:
    pool = WorkerPool({F: {}}, count=2, timeout_s=3600)
    done: list[str] = []
    hanging = [call("1"), call("hang"), call("1")]
    pool.add(hanging, lambda: done.append("hanging"))
    others = [[call(str(row)) for row in range(8)] for _ in range(6)]
    for calls in others:
        pool.add(calls, lambda: done.append("other"))
    turn_until(pool, lambda: len(done) == 6)
    late = [call("pid")]
    pool.add(late, lambda: done.append("late"))
    turn_until(pool, lambda: len(done) == 7)
    assert done == ["other"] * 6 + ["late"] and not hanging[1].scores and pool.connections()
    pool.close()
    pool.poll()
    assert len(done) == 7 and not pool.connections()
    assert gone(int(late[0].scores[0].value or 0))


def test_a_worker_that_dies_costs_its_own_call_and_no_other_batch(patient_pool: WorkerPool) -> None:
    deeds = ["0", "1", "kill", "3", "exit", "5", "leave a child and exit", "7"]
    batches = [[call(deed if row == number else str(row)) for row in range(8)] for number, deed in enumerate(deeds)]
    done: list[int] = []
    for number, calls in enumerate(batches):
        patient_pool.add(calls, lambda number=number: done.append(number))
    turn_until(patient_pool, lambda: len(done) == 8)
    found = [[call.scores[0].value for call in calls] for calls in batches]
    dead = (2, 4, 6)
    assert found == [[None if row == number in dead else row for row in range(8)] for number in range(8)]
    assert sorted(done) == list(range(8))


def test_the_end_of_a_process_is_readable(patient_pool: WorkerPool) -> None:
    done: list[bool] = []
    patient_pool.add([call("1"), call("kill")], lambda: done.append(True))
    while not done:
        assert wait(patient_pool.connections(), 60)
        patient_pool.poll()


def test_scores_that_nobody_took_in_for_long_are_not_overdue() -> None:
    pool = WorkerPool({F: {}}, count=1, timeout_s=0.5)
    before = outcomes(pool, ["pid"])
    (late,) = calls = [call("1")]
    pool.add(calls, lambda: None)
    pool.poll()
    time.sleep(1)  # the controller is busy
    turn_until(pool, lambda: not pool.connections())
    assert late.scores[0].value == 1.0 and outcomes(pool, ["pid"]) == before
    pool.close()


def test_what_done_raises_comes_out_of_a_turn_and_other_batches_are_done(pool: WorkerPool) -> None:
    done: list[str] = []

    def fail() -> None:
        raise KeyError("nobody wants it")

    pool.add([], fail)
    pool.add([], lambda: done.append("second"))
    with pytest.raises(KeyError, match="nobody wants it"):
        pool.poll()
    assert wait(pool.connections(), 0)
    pool.poll()
    assert done == ["second"] and not pool.connections()


def test_slow_calls_are_spread_and_quick_ones_go_together(tmp_path: Path) -> None:
    path = tmp_path / "naps.py"
    path.write_text(
        "import os, time\ndef nap(completion):\n    time.sleep(float(completion))\n    return os.getpid()\n"
    )
    pool = WorkerPool({f"{path}:nap": {}}, count=2, timeout_s=20)

    def processes(seconds: str, count: int) -> int:
        return len(set(outcomes(pool, [seconds] * count, f"{path}:nap")))

    assert processes("0.05", 20) == 2
    assert processes("0.05", 2) == 2  # each has taken longer than a chunk may
    processes("0", 1000)
    assert processes("0", 8) == 1
    pool.close()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_their_parent_even_inside_a_call(busy: bool) -> None:
    script = (
        "import pickle, sys\n"
        "from tandem.reward.workers import WorkerPool\n"
        "from tandem.reward.functions import RewardCall\n"
        "pool = WorkerPool({sys.argv[1]: {}}, count=1, timeout_s=60)\n"
        "call = lambda text: RewardCall(sys.argv[1], 0, [pickle.dumps({})], [text])\n"
        "pid = call('pid')\n"
        "pool.run([pid])\n"
        "print(int(pid.scores[0].value), flush=True)\n"
        "pool.run([call('hang')]) if sys.argv[2] == 'True' else sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, F, str(busy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert processes_of(worker)
        time.sleep(0.5 * busy)  # until it is inside the call
        parent.kill()
    assert gone(worker)
