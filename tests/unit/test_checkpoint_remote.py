"""Checkpoints in object storage: complete or not one, as many as on the disk, verified when they are fetched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tandem.checkpoint.remote import RemoteCheckpoints
from tandem.checkpoint.store import CheckpointStore, damage
from tandem.errors import TandemError, UserError
from tests.conftest import ROOT


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/run"
    else:
        yield "memory://bucket/run"
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def store_of(run: Path, url: str, keep_last: int = 2) -> CheckpointStore:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("trainer: {run_dir: elsewhere}\n")
    remote = RemoteCheckpoints(url)
    remote.claim(run)
    return CheckpointStore(run, keep_last, remote=remote)


def save(store: CheckpointStore, step: int, best: bool = False) -> None:
    with store.write(step, step if best else None) as draft:
        for part in ("model", "state"):
            (draft.directory / part).mkdir()
            (draft.directory / part / "data.bin").write_text(f"{part} of {step}")
    store.finish()


def there(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    prefix = root.lstrip("/")
    return sorted(path.lstrip("/").removeprefix(f"{prefix}/") for path in files.find(root))


def here(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name != ".lock")


def test_what_is_there_is_what_is_on_the_disk(tmp_path: Path, url: str) -> None:
    store = store_of(tmp_path / "run", url)
    save(store, 1, best=True)
    for step in (2, 3, 4):
        save(store, step)
        assert there(url) == here(tmp_path / "run")
    assert [name for name in there(url) if "manifest" in name] == [
        f"checkpoints/step_{step:06d}/manifest.json" for step in (1, 3, 4)
    ]


def test_the_millionth_step_is_later_than_the_one_before(tmp_path: Path, url: str) -> None:
    store = store_of(tmp_path / "run", url, keep_last=1)
    save(store, 999_999)
    fetched = tmp_path / "fetched"
    RemoteCheckpoints(url).fetch(fetched)
    save(store, 1_000_000)
    assert not RemoteCheckpoints(url).is_behind(tmp_path / "run/checkpoints/step_1000000")
    RemoteCheckpoints(url).claim(tmp_path / "run")
    RemoteCheckpoints(url).fetch(fetched)
    assert (fetched / "checkpoints/latest").read_text() == "step_1000000\n"
    with pytest.raises(UserError, match="is further"):
        (tmp_path / "run/checkpoints/latest").write_text("step_999999\n")
        RemoteCheckpoints(url).claim(tmp_path / "run")


def test_a_fetched_run_goes_on_where_it_was(tmp_path: Path, url: str) -> None:
    save(store_of(tmp_path / "run", url), 7)
    remote = RemoteCheckpoints(url)
    assert remote.config() == "trainer: {run_dir: elsewhere}\n"
    remote.fetch(tmp_path / "other")
    latest = CheckpointStore(tmp_path / "other", 2).latest()
    assert latest == tmp_path / "other/checkpoints/step_000007"
    assert here(tmp_path / "other") == here(tmp_path / "run")


def test_a_run_that_is_further_keeps_its_own(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of(tmp_path / "run", url)
    save(store, 1)
    save(CheckpointStore(tmp_path / "run", 2), 2)
    RemoteCheckpoints(url).fetch(tmp_path / "run")
    assert "nothing is fetched" in capsys.readouterr().out
    assert CheckpointStore(tmp_path / "run", 2).latest() == tmp_path / "run/checkpoints/step_000002"


def test_a_copy_that_is_cut_short_is_no_checkpoint(tmp_path: Path, url: str) -> None:
    """Whichever file it ends at; and the next copy takes its place."""
    store = store_of(tmp_path / "run", url)
    save(store, 1)
    plain = CheckpointStore(tmp_path / "run", 2)
    save(plain, 2)
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    for end in range(3):
        left = [end]

        def check(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("cut short")

        with pytest.raises(RuntimeError, match="cut short"):
            RemoteCheckpoints(url).push(checkpoint, {"latest": checkpoint.name}, 2, check)
        assert "checkpoints/step_000002/manifest.json" not in there(url)
        fetched = tmp_path / f"fetched {end}"
        RemoteCheckpoints(url).fetch(fetched)
        assert CheckpointStore(fetched, 2).latest() == fetched / "checkpoints/step_000001"
    RemoteCheckpoints(url).push(checkpoint, {"latest": checkpoint.name}, 1, lambda: None)
    assert [name for name in there(url) if "manifest" in name] == ["checkpoints/step_000002/manifest.json"]


def test_damage_there_is_found_when_it_is_fetched(tmp_path: Path, url: str) -> None:
    save(store_of(tmp_path / "run", url), 3)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/checkpoints/step_000003/state/data.bin", b"state of 4")
    with pytest.raises(UserError, match=r"damaged .*state/data.bin.*; name an earlier one in .*/checkpoints/latest"):
        RemoteCheckpoints(url).fetch(tmp_path / "other")
    files.rm_file(f"{root}/checkpoints/step_000003/state/data.bin")
    with pytest.raises(UserError, match="step_000003 lacks a file of its manifest"):
        RemoteCheckpoints(url).fetch(tmp_path / "other")
    assert here(tmp_path / "other") == []


@pytest.mark.parametrize("path", ["../../../outside", "/tmp/outside", "state/../../outside", "./x", "a//b", "a\\b", ""])
def test_a_manifest_from_elsewhere_writes_nothing_but_below_the_run(tmp_path: Path, url: str, path: str) -> None:
    save(store_of(tmp_path / "run", url), 1)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/checkpoints/step_000001/manifest.json", json.dumps({"files": {path: {}}}).encode())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"which is no path below the checkpoint; name an earlier one in"):
        RemoteCheckpoints(url).fetch(tmp_path / "other")
    after = [there for there in sorted(tmp_path.rglob("*")) if tmp_path / "other" not in (there, *there.parents)]
    assert after == before and not (tmp_path / "other/checkpoints/latest").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "not json", '{"files": 3}', '{"files": {}}', '{"files": ["a"]}']
)
def test_what_is_no_manifest_is_told(tmp_path: Path, url: str, text: str) -> None:
    save(store_of(tmp_path / "run", url), 1)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/checkpoints/step_000001/manifest.json", text.encode())
    with pytest.raises(UserError, match=r"manifest.json is no manifest: .*; name an earlier one"):
        RemoteCheckpoints(url).fetch(tmp_path / "other")
    (tmp_path / "run/checkpoints/step_000001/manifest.json").write_text(text)
    assert "is no manifest" in (damage(tmp_path / "run/checkpoints/step_000001") or "")


@pytest.mark.parametrize("name", ["../../x", "/x", "step_1", "step_000001/..", ""])
def test_a_pointer_from_elsewhere_names_a_checkpoint_or_is_told(tmp_path: Path, url: str, name: str) -> None:
    save(store_of(tmp_path / "run", url), 1)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/checkpoints/latest", name.encode())
    with pytest.raises(UserError, match=r"it is to name a checkpoint: step_000010"):
        RemoteCheckpoints(url).fetch(tmp_path / "other")


def test_where_no_run_is(tmp_path: Path, url: str) -> None:
    save(store_of(tmp_path / "run", url), 1)
    with pytest.raises(UserError, match=r"/nothing: no checkpoint of a run there \(no config.yaml\)"):
        RemoteCheckpoints(f"{url}/nothing").config()


def test_a_url_that_nobody_knows() -> None:
    with pytest.raises(UserError, match=r"s4://bucket: .*install fsspec's package for s4://"):
        RemoteCheckpoints("s4://bucket")


def test_what_fails_there_is_told_and_the_checkpoint_is_whole_here(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", f"file://{tmp_path}/bucket")
    shutil.rmtree(tmp_path / "bucket", ignore_errors=True)
    (tmp_path / "bucket").write_text("a file, where a directory is needed")
    with pytest.raises(TandemError, match=r"checkpoint_url: step_000005 cannot be copied to file://.* it is whole in"):
        save(store, 5)
    latest = CheckpointStore(tmp_path / "run", 2).latest()
    assert latest is not None and damage(latest) is None
    shutil.rmtree(tmp_path / "run")


def test_a_run_that_goes_on_elsewhere_keeps_its_best_there(tmp_path: Path, url: str) -> None:
    """And as many as before, although it has fetched one alone."""
    store = store_of(tmp_path / "run", url)
    save(store, 1, best=True)
    for step in (2, 3):
        save(store, step)
    RemoteCheckpoints(url).fetch(tmp_path / "other")
    other = store_of(tmp_path / "other", url)
    kept = [[1, 3, 4], [1, 4, 5]]
    for step in (4, 5):
        save(other, step)
        assert [name for name in there(url) if "manifest" in name] == [
            f"checkpoints/step_{number:06d}/manifest.json" for number in kept.pop(0)
        ]
    save(other, 6, best=True)
    assert "checkpoints/step_000001/manifest.json" not in there(url)


def run_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text("trainer: {run_dir: elsewhere}\n")
    return path


def test_another_run_cannot_take_the_place_of_the_one_there(tmp_path: Path, url: str) -> None:
    """Whether it has no checkpoint yet, or more of them, by the same settings; nor does it get that run's."""
    save(store_of(tmp_path / "run", url), 3)
    before = there(url)
    new = run_directory(tmp_path / "new")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"holds the checkpoints of another run \(step_000003\) than .*/new; continue"
        ):
            RemoteCheckpoints(url).claim(new)
        save(CheckpointStore(new, 2), 4)
        with pytest.raises(UserError, match=r"/new: holds another run than .*; give another trainer.run_dir"):
            RemoteCheckpoints(url).fetch(new)
    assert there(url) == before
    RemoteCheckpoints(url).claim(tmp_path / "run")
    RemoteCheckpoints(f"{url}/new").claim(new)
    assert there(f"{url}/new") == ["config.yaml", "run_id"]


def test_an_old_copy_of_a_run_does_not_delete_what_is_newer_there(tmp_path: Path, url: str) -> None:
    store = store_of(tmp_path / "run", url)
    save(store, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    save(store, 2)
    before = there(url)
    with pytest.raises(
        UserError, match=r"is further \(step_000002\) than .*/old \(step_000001\).*continue with --resume"
    ):
        RemoteCheckpoints(url).claim(tmp_path / "old")
    RemoteCheckpoints(url).fetch(tmp_path / "old")
    RemoteCheckpoints(url).claim(tmp_path / "old")
    assert there(url) == before
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/checkpoints/step_000003")
    files.pipe_file(f"{root}/checkpoints/step_000003/model", b"the rest was not copied")
    RemoteCheckpoints(url).claim(tmp_path / "old")


def test_while_a_checkpoint_is_replaced_the_latest_is_the_one_before(tmp_path: Path, url: str) -> None:
    store = store_of(tmp_path / "run", url)
    for step in (1, 2):
        save(store, step)
    pushed = tmp_path / "run/checkpoints/step_000002"
    for left in ("step_000001", None):
        calls = iter(range(9))

        def stop_at_the_second_file(calls: Iterator[int] = calls) -> None:
            if next(calls) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            RemoteCheckpoints(url).push(pushed, {"latest": pushed.name}, 2, stop_at_the_second_file)
        assert ("checkpoints/latest" in there(url)) is (left is not None)
        if left is not None:
            RemoteCheckpoints(url).fetch(tmp_path / "fetched")
            assert (tmp_path / "fetched/checkpoints/latest").read_text() == f"{left}\n"
        RemoteCheckpoints(url).push(pushed, {"latest": pushed.name}, 1, lambda: None)
        assert "checkpoints/step_000001/manifest.json" not in there(url)


def test_a_url_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    run_directory(tmp_path / "run")
    shutil.rmtree(tmp_path / "bucket", ignore_errors=True)
    (tmp_path / "bucket").write_text("a file, where a directory is needed")
    with pytest.raises(UserError, match=r"trainer.checkpoint_url: file://.*/bucket cannot be written .*another URL"):
        RemoteCheckpoints(f"file://{tmp_path}/bucket").claim(tmp_path / "run")


def test_a_resumed_run_copies_what_it_had_not_copied(tmp_path: Path, url: str) -> None:
    """The last checkpoint of a run, say: no other one would follow. What is there already is not copied again."""
    run = tmp_path / "run"
    save(store_of(run, url), 1)
    save(CheckpointStore(run, 2), 2)
    assert RemoteCheckpoints(url).is_behind(run / "checkpoints/step_000002")
    store = store_of(run, url)
    store.copy(run / "checkpoints/step_000002")
    store.finish()
    assert there(url) == here(run)
    for step, behind in ((1, False), (2, False), (3, True)):
        assert RemoteCheckpoints(url).is_behind(run / f"checkpoints/step_{step:06d}") is behind
    (run / "checkpoints/step_000002/manifest.json").write_text("of a run that went back, and came here again")
    assert RemoteCheckpoints(url).is_behind(run / "checkpoints/step_000002")


HANGS = """
import sys
from pathlib import Path
from threading import Event
from fsspec.implementations.memory import MemoryFileSystem
from tandem.checkpoint.remote import RemoteCheckpoints
from tandem.checkpoint.store import CheckpointStore

run, begun = Path(sys.argv[1]), Event()
(run / "config.yaml").touch()

def hang(self, here, there, **_):
    if there.endswith("data.bin"):
        begun.set()
        Event().wait()

MemoryFileSystem.put_file = hang
store = CheckpointStore(run, 2, remote=RemoteCheckpoints("memory://bucket/run"))
with store.write(1) as draft:
    (draft.directory / "data.bin").touch()
begun.wait()
store.abandon()
print(store.latest().name)
"""


def test_a_copy_that_hangs_holds_up_no_end(tmp_path: Path) -> None:
    """Neither that of the attempt nor that of the process: Ctrl-C twice ends at once."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=100, check=True, cwd=ROOT
    )
    assert ended.stdout == "step_000001\n"
