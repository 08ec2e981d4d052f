"""Processes of this machine: what they print, how they end, and that none stays behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from threading import Thread

import pytest
import torch

from tandem.cluster import local
from tandem.cluster.local import LocalCluster
from tandem.controller.placed import Placed
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import WorkerGroup
from tandem.errors import UserError, WorkerLost
from tests.cluster_workers import Probe, ragged_batch
from tests.conftest import ROOT

SCRIPT = Path(__file__).parents[1] / "cluster_script.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(timeout_s=60)
    yield made
    made.close()


def limit(cluster: LocalCluster, seconds: float) -> None:
    """Of its calls from now on: those before, which start processes, may take their time."""
    cluster._timeout_s = seconds


def spawn(cluster: LocalCluster, name: str = "main", size: int = 2) -> WorkerGroup:
    return WorkerGroup(cluster.spawn(ResourcePool(name, (size,))), "probe", Probe)


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids: list[int]) -> bool:
    """Soon: what is killed takes a moment to die."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def session(leader: int) -> list[int]:
    """The processes of a session: its leader and what that has started."""
    stats = [(int(path.parent.name), path) for path in Path("/proc").glob("[0-9]*/stat")]
    found = []
    for pid, path in stats:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [pid] if int(path.read_text().rpartition(")")[2].split()[3]) == leader else []
    return found


def test_lines_are_forwarded_with_pool_and_rank(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    spawn(cluster, "talkers").say("0%\r50%\rone\ntwo", "to err").get()
    cluster.close()
    lines = [f"(talkers rank {rank}) {line}" for rank in range(2) for line in ("one", "to err", "two")]
    assert sorted(capsys.readouterr().out.splitlines()) == lines


def test_processes_have_one_thread_and_todays_environment(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TANDEM_TEST", "today")
    assert spawn(cluster, size=1).settings("TANDEM_TEST").get() == [("today", 1)]


def test_gpus_are_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    cluster = LocalCluster(timeout_s=60)
    first = cluster.spawn(ResourcePool("first", (1,)))
    assert spawn(cluster).settings("CUDA_VISIBLE_DEVICES").get() == [("5", 1), ("7", 1)]
    with pytest.raises(UserError, match="pool wide: 2 processes need a GPU each; free are 0 of 3"):
        spawn(cluster, "wide")
    first.close()
    assert spawn(cluster, size=1).settings("CUDA_VISIBLE_DEVICES").get() == [("4", 1)]
    cluster.close()


@pytest.mark.parametrize(
    ("status", "told"),
    [(-signal.SIGKILL, "was killed by SIGKILL (as the system does"), (3, "ended with exit status 3;")],
)
def test_a_death_is_told_and_ends_everything(cluster: LocalCluster, status: int, told: str) -> None:
    others, group = spawn(cluster, "others"), spawn(cluster)
    pids = others.process().get() + group.process().get()
    waiting = others.hang()
    group.die(1, status)
    with pytest.raises(WorkerLost) as error:
        waiting.get()  # a death is noticed wherever the controller waits
    message = str(error.value)
    assert f"main rank 1 (process {pids[3]}) {told}" in message
    assert message.endswith("the last that it printed:\nmy last words")
    assert gone(pids)
    with pytest.raises(WorkerLost, match="pool others: its processes have ended"):
        others.first().get()


def test_a_call_that_hangs_ends_with_all_stacks() -> None:
    cluster = LocalCluster(timeout_s=60)
    others, group = spawn(cluster, "others"), spawn(cluster)
    pids = others.process().get() + group.process().get()
    assert group.numbers(3).get()[0].tolist() == [0, 1, 2]
    limit(cluster, 2)
    with pytest.raises(WorkerLost) as error:
        group.hang().get()
    message = str(error.value)
    assert "longer than cluster.timeout_s: 2" in message
    parts = message.split("main rank 0:")[1].split("main rank 1:")
    assert "cluster_workers.py" in parts[0] and "in hang" in parts[0]  # asleep
    assert "in barrier" in parts[1] and "in hang" in parts[1]  # inside of a collective
    assert "others rank 0:" in message and "others rank 1:" in message
    assert gone(pids)


def test_the_time_out_is_that_of_each_optimizer_step() -> None:
    """Six take 3 s together, which no single call may."""
    cluster = LocalCluster(timeout_s=60)
    placed, group = Placed(ragged_batch([1, 1])), spawn(cluster)
    limit(cluster, 2)
    learned = group.learn([placed.rows() for _ in range(6)], 2.5).get()
    assert [metrics for metrics, _ in learned] == [{"rows": 2}] * 6
    cluster.close()


def test_a_call_that_hangs_and_that_nobody_waits_for_ends_everything() -> None:
    cluster = LocalCluster(timeout_s=60)
    others, group = spawn(cluster, "others", 1), spawn(cluster)
    limit(cluster, 2)
    group.hang()
    with pytest.raises(WorkerLost, match=r"longer than cluster\.timeout_s: 2"):
        while True:
            others.first().get()
    cluster.close()


def test_nothing_is_left_open_after_many_pools(cluster: LocalCluster) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(3):
        pids = spawn(cluster).process().get()
        cluster.close()
        assert gone(pids)
        counts.append(descriptors())
    assert counts[0] == counts[2]


@contextmanager
def start(*arguments: str, terminal: int | None = None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def until(script: subprocess.Popen[str], word: str) -> list[str]:
    assert script.stdout is not None
    read: list[str] = []
    for line in script.stdout:
        read.append(line)
        if line.startswith(word):
            return line.split()
    raise AssertionError(f"{word} was not printed, only {''.join(read)}")


def test_a_killed_controller_takes_all_its_processes_along() -> None:
    with start("60", "hangs") as script:
        pids = [int(pid) for pid in until(script, "processes")[1:]]
        until(script, "waiting")
        pids += session(script.pid)
        assert all(map(alive, pids)) and len(pids) >= 4  # with the fork server
        script.kill()
        assert gone(pids)


def test_a_rank_whose_controller_is_killed_while_it_starts_ends(tmp_path: Path) -> None:
    with start("60", "starts late", str(tmp_path / "claim")) as script:
        pids = [int(until(script, "starting")[1])]
        script.kill()
        pids += session(script.pid)
        script.wait()
        assert gone(pids)


def test_a_start_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(local, "Thread", Interrupted)
    cluster, before = LocalCluster(timeout_s=60), {child.pid for child in active_children()}
    with pytest.raises(KeyboardInterrupt):
        spawn(cluster)
    started = [child for child in active_children() if child.pid not in before]
    cluster.close()
    try:
        assert len(started) == 1 and gone([child.pid or 0 for child in started])
    finally:
        for child in started:
            child.kill()


def test_workers_do_not_hear_of_ctrl_c_and_end_with_the_controller() -> None:
    with start("60", "hangs") as script:
        pids = [int(pid) for pid in until(script, "processes")[1:]]
        for number in ("first", "second"):
            until(script, "waiting")
            assert all(map(alive, pids))
            os.killpg(script.pid, signal.SIGINT)
            until(script, number)
        assert until(script, "ValueError:")
        script.wait()
        assert gone(pids + session(script.pid))


def read_until(terminal: int, pattern: str) -> str:
    """The first group of the pattern, once it has appeared."""
    read = ""
    while not (found := re.search(pattern, read)):
        assert select.select([terminal], [], [], 60)[0], f"only {read!r} was printed"
        read += os.read(terminal, 1024).decode()
    return found[1]


def test_breakpoint_attaches_the_terminal_to_one_rank_after_the_other() -> None:
    ours, theirs = pty.openpty()
    with start("60", "breaks", terminal=theirs) as script:
        os.close(theirs)
        ranks = []
        for _ in range(2):
            rank = read_until(ours, r"\(main rank (.)\) $")
            if not ranks:
                script.send_signal(signal.SIGUSR1)  # a second is the limit of the call
                time.sleep(3)
                script.send_signal(signal.SIGUSR2)  # until the next rank is at its prompt, it is a minute again
            os.write(ours, b"p 100 + mine\n")
            assert read_until(ours, r"\n(\d+)\r\n\(main rank .\) $") == f"11{rank}"
            os.write(ours, b"n\n")
            assert read_until(ours, r"\(main rank (.)\) $") == rank
            os.write(ours, b"c\n")
            ranks.append(rank)
        assert sorted(ranks) == ["0", "1"]
        assert read_until(ours, r"answers (.*)\r") == "[10, 11]"
        assert script.wait() == 0
    os.close(ours)
