"""Checkpoints are complete or absent: pruning, damage, and a process killed at any file operation."""

import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tandem.checkpoint.draft
from tandem.checkpoint.draft import seals_of_rank, write_seals
from tandem.checkpoint.store import CheckpointStore, damage
from tandem.errors import TandemError, UserError, WorkerError
from tandem.files import sync_tree


def fill(directory: Path, content: str) -> None:
    for part in ("model", "state"):
        (directory / part).mkdir()
        (directory / part / "data.bin").write_text(f"{part} {content}")


def save(store: CheckpointStore, step: int, content: str = "first", best: bool = False) -> None:
    with store.write(step, step if best else None) as draft:
        fill(draft.directory, content)
    store.finish()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_written_checkpoint_is_the_latest_and_verifies(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    assert store.latest() is None
    save(store, 10)
    assert names(tmp_path) == ["latest", "step_000010"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000010\n"
    latest = CheckpointStore(tmp_path, keep_last=2).latest()
    assert latest == tmp_path / "checkpoints" / "step_000010"
    assert damage(latest) is None
    manifest = json.loads((latest / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert manifest["files"]["model/data.bin"] == {
        "bytes": 11,
        "sha256": "ccd80eeadf0275982e0af8e4a6acd7874c61d4750d0a2b53b7ac4a14a5e4a367",
    }


def test_keep_last_and_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1, best=True)
    for step in (2, 3, 4):
        save(store, step)
    assert names(tmp_path) == ["best", "latest", "step_000001", "step_000003", "step_000004"]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000001\n"
    save(store, 5, best=True)
    assert names(tmp_path) == ["best", "latest", "step_000004", "step_000005"]
    save(store, 6)
    save(store, 7)
    assert names(tmp_path) == ["best", "latest", "step_000005", "step_000006", "step_000007"]


def test_an_exception_leaves_everything_as_it_was(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    with pytest.raises(RuntimeError, match="disk full"), store.write(2) as draft:
        fill(draft.directory, "half")
        raise RuntimeError("disk full")
    assert names(tmp_path) == ["latest", "step_000001"]


def test_a_full_disk_is_told_in_a_line(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    told = rf"step_000002: no space left .* with --resume {tmp_path}$"
    with pytest.raises(TandemError, match=told), store.write(2) as draft:
        fill(draft.directory, "half")
        raise WorkerError("actor, rank 1 of 2: …\nOSError: [Errno 28] No space left on device")
    assert names(tmp_path) == ["latest", "step_000001"]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model/data.bin", "short", "not what was written: model/data.bin"),
        ("model/data.bin", "model fIrst", "not what was written: model/data.bin"),
        ("state/data.bin", None, "No such file"),
        ("manifest.json", "{", "Expecting"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_way_back(tmp_path, file, content, said):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    save(store, 2)
    damaged = tmp_path / "checkpoints/step_000002" / file
    damaged.unlink() if content is None else damaged.write_text(content)
    with pytest.raises(UserError, match=f"step_000002: damaged .*{said}.* name of an earlier one into .*latest"):
        store.latest()
    (tmp_path / "checkpoints" / "latest").write_text("step_000001\n")
    assert store.latest() == tmp_path / "checkpoints" / "step_000001"


def test_going_back_to_an_earlier_checkpoint_drops_the_later_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (5, 10, 15):
        save(store, step)
    (tmp_path / "checkpoints" / "latest").write_text("step_000005\n")
    assert store.latest() == tmp_path / "checkpoints" / "step_000005"
    save(store, 10, "second")
    assert names(tmp_path) == ["latest", "step_000005", "step_000010"]
    assert (tmp_path / "checkpoints/step_000010/model/data.bin").read_text() == "model second"


def test_a_run_that_goes_back_has_the_best_of_the_steps_that_are_left(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=5)
    best = store.directory / "best"
    for step, best_step in ((5, 5), (10, 5), (15, 15)):
        with store.write(step, best_step) as draft:
            (draft.directory / "state").write_text("")
        store.finish()
    assert best.read_text() == "step_000015\n"
    for step, best_step, expected in ((12, 5, "step_000005\n"), (13, 13, "step_000013\n"), (11, 3, None)):
        with store.write(step, best_step) as draft:  # from 10 on, the same again, and where that of step 3 is gone
            (draft.directory / "state").write_text("")
        store.finish()
        assert (best.read_text() if best.exists() else None) == expected
        assert not (store.directory / "step_000015").exists()


def test_the_best_value_stands_where_its_checkpoint_is(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, best_step in ((5, 5), (10, 5)):
        with store.write(step, best_step) as draft:
            (draft.directory / "state").write_text("")
        store.finish()
    latest = store.latest()
    assert store.best_of(5, latest) == 5
    assert store.best_of(2, latest) is None, "it was pruned"
    assert store.best_of(None, latest) == 5, "older versions do not say the step, but there is the pointer"
    (store.directory / "best").write_text("step_000015\n")
    (store.directory / "step_000015").mkdir()
    assert store.best_of(None, latest) is None, "of a step that the run has not got to again"


def test_a_checkpoint_that_takes_the_place_of_the_best_is_the_best_only_if_it_is_said_to_be(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 5)
    save(store, 10, best=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_000005\n")
    save(store, 10, "second")
    assert names(tmp_path) == ["latest", "step_000005", "step_000010"]
    save(store, 10, "third", best=True)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_000010\n"


def test_steps_are_compared_as_numbers(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (999_998, 999_999, 1_000_000):
        save(store, step)
    assert names(tmp_path) == ["latest", "step_1000000", "step_999999"]
    assert store.latest() == tmp_path / "checkpoints" / "step_1000000"


def test_while_files_are_flushed_the_caller_goes_on(tmp_path, monkeypatch):
    """And after what it raises meanwhile the write can be given up, which leaves everything as it was."""
    turns: list[int] = []
    original = tandem.checkpoint.draft.sync

    def slow_sync(path: Path) -> None:
        limit = time.monotonic() + 10
        while path.name == "data.bin" and len(turns) < 3 and time.monotonic() < limit:
            time.sleep(0.001)
        original(path)

    monkeypatch.setattr(tandem.checkpoint.draft, "sync", slow_sync)
    save(CheckpointStore(tmp_path, 2, lambda: turns.append(1)), 1)
    assert len(turns) >= 3 and damage(tmp_path / "checkpoints/step_000001") is None

    def fail() -> None:
        turns.append(1)
        raise WorkerError("a worker is lost meanwhile")

    turns.clear()
    store = CheckpointStore(tmp_path, 2, fail)
    with store.write(2) as draft:
        draft.seals.append(draft.directory / "of a rank that never writes it")
    with pytest.raises(WorkerError, match="meanwhile"):
        store.finish()
    store.abandon()
    assert names(tmp_path) == ["latest", "step_000001"]


@pytest.mark.parametrize("slow", ["sync_tree", "shutil.rmtree"])
def test_while_directories_are_flushed_and_deleted_the_caller_goes_on(tmp_path, monkeypatch, slow):
    turns: list[int] = []
    place, _, name = f"tandem.checkpoint.store.{slow}".rpartition(".")
    original = pkgutil.resolve_name(f"{place}.{name}")

    def wait_for_turns(path: Path) -> None:
        turns.clear()
        limit = time.monotonic() + 10
        while len(turns) < 3 and time.monotonic() < limit:
            time.sleep(0.001)
        original(path)

    store = CheckpointStore(tmp_path, 1, lambda: turns.append(1))
    save(store, 1)
    monkeypatch.setattr(f"{place}.{name}", wait_for_turns)
    save(store, 2)
    assert len(turns) >= 3 and names(tmp_path) == ["latest", "step_000002"]


def begin(store: CheckpointStore, step: int, ranks: int) -> list[Path]:
    """A checkpoint that waits for so many ranks; the files by which they say that theirs are written."""
    with store.write(step) as draft:
        fill(draft.directory, "small")
        draft.seals += [seals_of_rank(draft.directory, rank) for rank in range(ranks)]
        return draft.seals


def test_the_latest_is_the_one_before_until_all_ranks_have_written(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    first, second = begin(store, 2, ranks=2)
    large = first.parent / "state" / "large.bin"
    large.write_bytes(b"of rank 0")
    write_seals(first, [large])
    store.check()
    assert store.latest() == tmp_path / "checkpoints/step_000001"
    write_seals(second, [])
    store.finish()
    latest = store.latest()
    assert latest == tmp_path / "checkpoints/step_000002"
    files = json.loads((latest / "manifest.json").read_text())["files"]
    assert sorted(files) == ["model/data.bin", "state/data.bin", "state/large.bin"]
    (latest / "state/large.bin").write_bytes(b"of rank 1")
    assert damage(latest) == "not what was written: state/large.bin"


def test_what_goes_wrong_on_a_rank_is_raised_at_the_next_look(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)

    def fail() -> None:
        raise WorkerError("actor, rank 1 of 2: …\nOSError: [Errno 28] No space left on device")

    with store.write(2) as draft:
        fill(draft.directory, "small")
        draft.seals.append(draft.directory / "never written")
        draft.checks.append(fail)
    with pytest.raises(TandemError, match=rf"step_000002: no space left .* with --resume {tmp_path}$"):
        store.check()
    assert names(tmp_path) == ["latest", "step_000001"]
    save(store, 3)
    assert names(tmp_path) == ["latest", "step_000001", "step_000003"]


@pytest.mark.parametrize("ending", ["check", "finish", "next"])
def test_what_goes_wrong_in_the_thread_is_raised_once(tmp_path, ending):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)

    def fail() -> None:
        raise OSError(5, "Input/output error")

    with store.write(2) as draft:
        draft.writes.append(fail)
    while any(name.startswith(".") for name in names(tmp_path)):
        time.sleep(0.001)
    looks = {"check": store.check, "finish": store.finish, "next": lambda: save(store, 3)}
    time.sleep(0.05)  # the thread has removed what it had, and ends
    with pytest.raises(TandemError, match=r"step_000002: cannot be written .*Input/output error.*--resume"):
        looks[ending]()
    store.check()
    assert names(tmp_path) == ["latest", "step_000001"]


def test_the_next_checkpoint_waits_for_the_last(tmp_path):
    store = CheckpointStore(tmp_path, 2, lambda: late and write_seals(late.pop(), []))
    late = begin(store, 1, ranks=1)[:]
    save(store, 2)
    assert not late and names(tmp_path) == ["latest", "step_000001", "step_000002"]


KILL_EVERYWHERE = """
import os, shutil, sys
from pathlib import Path
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.store import damage

root = Path(sys.argv[1])
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree"}
left = None

def operation():
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os._exit(9)

sys.addaudithook(lambda event, arguments: operation() if event in EVENTS else None)

os.fsync = lambda descriptor: operation()  # the kernel outlives the process: nothing need reach the disk

def save(store, step, content, best=False):
    with store.write(step, step if best else None) as draft:
        for part in ("model", "state"):
            (draft.directory / part).mkdir()
            (draft.directory / part / "data.bin").write_text(f"{part} {content}")
    store.finish()

def check(run):
    latest = CheckpointStore(run, 1).latest()
    for checkpoint in (run / "checkpoints").glob("step_*"):
        assert damage(checkpoint) is None, checkpoint
    contents = {(latest / part / "data.bin").read_text().split()[1] for part in ("model", "state")}
    assert contents in ({"old"}, {"new"}), contents
    leftovers = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".step")]
    assert not leftovers, leftovers
    best = run / "checkpoints" / "best"
    assert latest.name != "step_000002" or best.read_text() == "step_000002\\n"
    return f"{latest.name}:{contents.pop()}"

def killed_after(operations, run, before):
    run.mkdir()
    save(CheckpointStore(run, 2), 1, "old")
    if before == "went back":
        save(CheckpointStore(run, 2), 2, "abandoned")
        (run / "checkpoints" / "latest").write_text("step_000001\\n")
    if before == "saved it already":
        save(CheckpointStore(run, 2), 2, "old", best=True)
    child = os.fork()
    if child == 0:
        global left
        left = operations
        try:
            save(CheckpointStore(run, 1), 2, "new", best=True)
        except BaseException:
            os._exit(8)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    seen = check(run)
    shutil.rmtree(run)
    return status, seen

for before in ("nothing", "went back", "saved it already"):
    operations, outcomes, status = 0, set(), 9
    while status == 9:
        status, seen = killed_after(operations, root / "run", before)
        outcomes.add(seen)
        operations += 1
    print(operations, *sorted(outcomes))
"""


def test_a_kill_at_any_file_operation_leaves_a_loadable_latest(tmp_path):
    """A child process dies at its n-th file operation while it writes step 2, or step 2 anew, for every n."""
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]  # and no word of a slow disk
    assert len(lines) == 3
    assert all(int(operations) > 30 for operations, *_ in lines)
    for _, *outcomes in lines[:2]:
        assert outcomes == ["step_000001:old", "step_000002:new"]
    assert lines[2][1:] == ["step_000001:old", "step_000002:new", "step_000002:old"]


def test_every_file_and_directory_of_a_tree_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("1")
    flushed: list[Path] = []
    monkeypatch.setattr("tandem.files.sync", flushed.append)
    sync_tree(tmp_path)
    assert {*flushed} == {tmp_path, tmp_path / "model", tmp_path / "model/weights"} and flushed[-1] == tmp_path
