"""Rows that are tokenised once: items from the cache are those in memory, and what has changed has another key."""

import fcntl
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import char_tokenizer, verl_row, write_lines

from tandem.config.data import DataConfig, SftDataConfig
from tandem.data.cache import CODE, PackedItem, RowCache
from tandem.data.dataset import Dataset, RLHFDataset
from tandem.data.packed import Packed
from tandem.data.preference import PreferenceDataset, RatedDataset
from tandem.data.rows import BadRow, Row, content_digest
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tests.architecture.test_imports import imports_of
from tests.conftest import ROOT

TOKENIZER = char_tokenizer()
ROWS = 1200
"""Two batches."""


def rl_rows() -> list[Any]:
    plain = [{"prompt": f"{n}+1=", "answer": n + 1, "level": {"of": [n, 0.1 * n, None]}} for n in range(ROWS // 2)]
    return plain + [verl_row(f"{n}é?") for n in range(ROWS // 2)]


def pairs() -> list[Any]:
    return [{"prompt": f"{n}=", "chosen": str(n), "rejected": "x" * (1 + n % 3), "margin": n / 7} for n in range(ROWS)]


def turns() -> list[Any]:
    said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    return [
        {"messages": [{"role": "user", "content": str(n)}, *said * (n % 2), {"role": "assistant", "content": "ok"}]}
        for n in range(ROWS)
    ]


KINDS: dict[str, tuple[Any, Any]] = {
    "prompts": (RLHFDataset, rl_rows), "demonstrations": (SftDataset, turns),
    "pairs": (PreferenceDataset, pairs), "rated answers": (RatedDataset, pairs),
}  # fmt: skip


def load(kind: Any, path: Path, cache: Path | None, *, tokenizer: Any = TOKENIZER, **keys: Any) -> Dataset[Any, Any]:
    given = {"directory": cache, "files_from_mib": 0 if cache else None, "workers": keys.pop("workers", 1)}
    section = {"cache": given, **keys}
    config = DataConfig if kind is RLHFDataset else SftDataConfig
    if config is SftDataConfig:
        section["train_files"] = [path]
    return kind([path, path], tokenizer, config.model_validate(section))


def plain(item: Any) -> Any:
    """To compare, types included."""
    if is_dataclass(item):
        return [plain(getattr(item, one.name)) for one in fields(item)]
    return (item.dtype, item.tolist()) if isinstance(item, np.ndarray) else item


@pytest.mark.parametrize("name", KINDS)
def test_cached_items_are_those_in_memory(name: str, tmp_path: Path) -> None:
    kind, rows = KINDS[name]
    path = write_lines(tmp_path / "rows.jsonl", rows())
    in_memory, cached = load(kind, path, None), load(kind, path, tmp_path / "cache")
    assert [plain(item) for item in cached] == [plain(item) for item in in_memory]
    assert len(in_memory) in (2 * ROWS, 4 * ROWS) and len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    assert (cached.descriptions, cached.items_of_files) == (in_memory.descriptions, in_memory.items_of_files)
    assert [(plain(item), n) for item, n in cached.kinds] == [(plain(item), n) for item, n in in_memory.kinds]
    assert plain(cached[-1]) == plain(in_memory[-1])


def test_several_processes_make_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [verl_row(f"{n}+{n}=") for n in range(2 * ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    one, several = tmp_path / "one", tmp_path / "several"
    for cache, workers in ((one, 1), (several, 2)):
        load(RLHFDataset, path, cache, workers=workers)
    (first,), (second,) = one.glob("*.arrow"), several.glob("*.arrow")
    assert first.name == second.name and first.read_bytes() == second.read_bytes()


def test_what_has_changed_has_another_key(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", write_lines(tmp_path / "rows.jsonl", [verl_row()] * 3)

    def made(*args: Any, **keys: Any) -> int:
        load(*args, **keys)
        return len(list(cache.glob("*.arrow")))

    assert made(RLHFDataset, path, cache) == 1
    (arrow,) = cache.glob("*.arrow")
    written = arrow.stat().st_mtime_ns
    copied = shutil.copy(path, tmp_path / "copy.jsonl")
    assert made(RLHFDataset, Path(copied), cache) == 1, "the same content"
    assert made(RLHFDataset, path, cache, prompts_per_step=7, shuffle=False, workers=2) == 1, "the same items"
    assert arrow.stat().st_mtime_ns == written, "which were not made again"
    assert made(RLHFDataset, path, cache, max_prompt_tokens=500) == 2
    template = str(TOKENIZER.chat_template) + "!"
    assert made(RLHFDataset, path, cache, tokenizer=char_tokenizer(template)) == 3
    assert made(RLHFDataset, path, cache, tokenizer=char_tokenizer(around="<bos> $A")) == 4
    write_lines(path, [verl_row()] * 4)
    assert made(RLHFDataset, path, cache) == 5


@pytest.mark.parametrize("edited", ["data/sampler.py", "data/chat.py"])
def test_rows_are_made_again_where_the_code_that_makes_them_has_changed(edited: str, tmp_path: Path) -> None:
    """And not where other code has, or the version."""
    path = write_lines(tmp_path / "rows.jsonl", [verl_row()])
    cache = tmp_path / "cache"
    load(RLHFDataset, path, cache)
    package = shutil.copytree(ROOT / "tandem", tmp_path / "other/tandem", ignore=shutil.ignore_patterns("__pycache__"))
    with (package / edited).open("a") as file:
        file.write("# edited\n")
    released = tmp_path / "other/tandem_rl-99.dist-info"
    released.mkdir()
    (released / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-rl\nVersion: 99\n")
    program = (
        "from importlib.metadata import version\nfrom pathlib import Path\n"
        "from test_data_cache import RLHFDataset, load\n"
        f"rows = load(RLHFDataset, Path({str(path)!r}), Path({str(cache)!r}))\n"
        "print(version('tandem-rl'), len(rows))"
    )
    places = os.pathsep.join([str(tmp_path / "other"), str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": places},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["99 2"], done.stderr
    assert len(list(cache.glob("*.arrow"))) == (2 if edited == "data/chat.py" else 1)


def test_all_code_that_makes_rows_is_in_the_key() -> None:
    """What the kinds of data sets import of this stage; but for `forms`, which is asked of rows that are there, and for
    what knows published sets, which words the mend of a bad row."""
    package, seen, waiting = ROOT / "tandem", set[str](), {kind.__module__ for kind, _ in KINDS.values()}
    while waiting:
        seen.add(module := waiting.pop())
        path = package.parent / f"{module.replace('.', '/')}.py"
        stage = {name for name in imports_of(path) if name.startswith("tandem.data.")}
        waiting |= {name for name in stage if not name.startswith("tandem.data.preprocess")} - seen
    assert {f"data/{module.rpartition('.')[2]}.py" for module in seen} - {"data/forms.py"} == {
        path for path in CODE if path.startswith("data/")
    }


def test_bad_rows_are_told_as_without_a_cache(tmp_path: Path) -> None:
    rows = [verl_row(), {"answer": "1"}, {"prompt": "x" * 2000}, verl_row()]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    for _ in range(2):
        told = []
        for cache in (None, tmp_path / "cache"):
            with pytest.raises(UserError) as error:
                load(RLHFDataset, path, cache)
            skipping = load(RLHFDataset, path, cache, on_bad_row="skip")
            told.append((str(error.value), skipping.descriptions, skipping.skipped, len(skipping)))
        assert told[0] == told[1] and told[0][2:] == (4, 4)


@pytest.mark.parametrize("cell", [float("nan"), [date(2026, 1, 2)], b"x"], ids=str)
def test_what_json_would_change_stays_in_memory(cell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row(weight=cell)]), path)
    assert len(load(RLHFDataset, path, tmp_path / "cache")) == 2
    told = (
        "rows.parquet: a row has pictures, or a value that JSON has no form for; its rows are tokenised at each start"
    )
    assert told in capsys.readouterr().out
    assert not list((tmp_path / "cache").glob("*.arrow"))


@pytest.mark.parametrize("damage", ["byte", "end"])
def test_a_damaged_file_is_not_read(damage: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rl_rows())
    load(RLHFDataset, path, tmp_path / "cache")
    (arrow,) = (tmp_path / "cache").glob("*.arrow")
    content = bytearray(arrow.read_bytes())
    if damage == "byte":
        content[content.index(b"77+1=")] ^= 1
        arrow.write_bytes(content)
    else:
        arrow.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"\.arrow is damaged .* delete it, and it is made anew"):
        [*load(RLHFDataset, path, tmp_path / "cache")]
    arrow.unlink()
    assert len([*load(RLHFDataset, path, tmp_path / "cache")]) == 2 * ROWS


class Appending:
    """A reader during whose work the file grows."""

    def pack_row(self, row: Row | BadRow, folder: Path) -> tuple[str, list[PackedItem]]:
        with (folder / "rows.jsonl").open("a") as file:
            file.write('{"prompt": "late"}\n')
        return "`prompt`", [PackedItem(Packed((np.zeros(1, np.int32),), "x"), "", 0)]


def test_what_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    cache = RowCache(tmp_path / "cache", workers=1)
    with pytest.raises(UserError, match=r"rows\.jsonl: it has changed while it was read"):
        cache.find_or_make(path, content_digest(path), Appending(), "one way")
    assert not [*(tmp_path / "cache").glob("*.json")]


def test_a_run_that_waits_for_another_ones_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Queue[str]()
    monkeypatch.setattr("tandem.data.cache.print", lambda line, **_: told.put(line), raising=False)
    path, cache = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}]), tmp_path / "cache"
    load(RLHFDataset, path, cache)
    for described in cache.glob("*.json"):
        described.unlink()
    (lock,) = cache.glob("*.lock")
    with ThreadPoolExecutor() as threads:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = threads.submit(load, RLHFDataset, path, cache)
            assert told.get() == "rows.jsonl: another run is tokenising its rows; waiting for them"
            assert not waiting.done()
        assert len(waiting.result()) == 2


def test_what_killed_builds_leave_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """And not the file that another process is writing, which holds its key's lock."""
    path, cache = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}]), tmp_path / "cache"
    cache.mkdir()
    abandoned, unlocked, written = (cache / f".{key}.arrow.tmp" for key in ("aa", "bb", "cc"))
    for file in (abandoned, unlocked, written, cache / "aa.lock", cache / "other.tmp"):
        file.touch()
    with (cache / "cc.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(load(RLHFDataset, path, cache)) == 2
    assert not abandoned.exists() and not unlocked.exists()
    assert written.exists() and (cache / "other.tmp").exists()


def test_a_cache_that_cannot_be_written_stops_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [verl_row()])
    assert len(load(RLHFDataset, path, path / "inside")) == 2
    assert "data.cache.directory: " in capsys.readouterr().out
