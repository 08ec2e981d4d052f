"""Files -> numbered rows, and what is said of files that cannot be read."""

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data import rows as rows_module
from tandem.data.rows import BadRow, read_chunks, read_rows
from tandem.errors import UserError

ROWS = [{"prompt": "a", "nested": {"list": [1, 2], "text": "é"}}, {"prompt": "b", "nested": {"list": [], "text": ""}}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.JSON.GZ", "rows.parquet"])
def test_every_kind_of_file_gives_the_same_plain_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=1)
    else:
        text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        path.write_bytes(gzip.compress(text) if name.lower().endswith("gz") else text)
    assert list(read_rows(path)) == [(1, ROWS[0]), (2, ROWS[1])]


def test_row_numbers_are_line_numbers_and_bad_lines_do_not_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n{"a": "\xff"}\n{"a": 2}')
    rows = dict(read_rows(path))
    assert list(rows) == [1, 3, 4, 5, 6]
    assert (rows[1], rows[6]) == ({"a": 1}, {"a": 2})
    assert [str(rows[n]).split(":")[0] for n in (3, 4, 5)] == [
        "the line is not valid JSON",
        "the line holds a list, not an object {…}",
        "the line is no text in UTF-8 (byte 8 of the line is 0xff); save the file as UTF-8",
    ]


def _parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([{"prompt": "x" * 50}] * 100), sink, compression="none", use_dictionary=False)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("gone.jsonl", None, "no such file"),
        ("empty.parquet", b"", "cannot be read .*0 bytes"),
        ("empty.jsonl", b"", "holds no rows"),
        ("blank.jsonl", b"\n \n", "holds no rows"),
        ("cut.parquet", _parquet_bytes()[:-20], "cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 500, mtime=0)[:-12], "cannot be read"),
        ("plain.jsonl.gz", b'{"prompt": "a"}\n', "cannot be read"),
        ("text.parquet", b'{"prompt": "a"}\n', "cannot be read"),
        ("rows.csv", b"a,b\n", r"data files end in \.parquet, \.jsonl"),
    ],
)
def test_an_unreadable_file_is_named_with_its_reason(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: .*{reason}"):
        list(read_rows(tmp_path / name))


def test_parquet_without_rows_and_with_a_damaged_page(tmp_path: Path) -> None:
    empty = tmp_path / "none.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(UserError, match="holds no rows"):
        list(read_rows(empty))
    damaged = bytearray(_parquet_bytes())
    damaged[4:40] = b"\xff" * 36
    (tmp_path / "page.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"page\.parquet: cannot be read"):
        list(read_rows(tmp_path / "page.parquet"))


def test_entries_of_a_list_that_no_dataset_can_read_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[\n1, null, {"prompt": "a"}, {"prompt": "half \\ud800"}]')
    rows = dict(read_rows(tmp_path / "rows.json"))
    assert rows[3] == {"prompt": "a"}
    assert [str(rows[number]) for number in (1, 2)] == [
        "the entry holds a number, not an object {…}",
        "the entry holds null, not an object {…}",
    ]
    assert isinstance(rows[4], BadRow) and "surrogates not allowed" in str(rows[4])


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
@pytest.mark.parametrize("text", [json.dumps(ROWS), "\n" + json.dumps(ROWS), "\ufeff" + json.dumps(ROWS)])
def test_a_list_on_one_line_and_a_byte_order_mark(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert [row for _, row in read_rows(path)] == ROWS


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").mkdir()
    with pytest.raises(UserError, match=r"part\.jsonl: .*directory"):
        list(read_rows(tmp_path / "part.jsonl"))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl", "rows.parquet", "rows.json"])
def test_a_row_that_is_too_long_is_a_bad_row_and_the_next_one_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "ROW_MIB", 1)
    path, given = tmp_path / name, [{"prompt": "a"}, {"prompt": "b" * (2**20 + 1)}, {"prompt": "c"}]
    text = "".join(json.dumps(row) + "\n" for row in given).encode()
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(given), path)
    elif name.endswith("json"):
        path.write_text(json.dumps(given, indent=1))
    else:
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    first, (number, bad), last = read_rows(path)
    assert (first, last) == ((1, given[0]), (3, given[2])) and number == 2
    assert isinstance(bad, BadRow) and "a row may have 1: keep" in str(bad)


def test_a_compressed_row_of_any_length_takes_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one is dropped in pieces."""
    monkeypatch.setattr(rows_module, "ROW_MIB", 4)
    path = tmp_path / "rows.jsonl.gz"
    deflate = zlib.compressobj(1, wbits=31)
    zeros = b"0" * 2**24
    with path.open("wb") as file:
        file.write(deflate.compress(b'{"prompt": "'))
        for _ in range(6):
            file.write(deflate.compress(zeros))
        file.write(deflate.compress(b'"}\n{"prompt": "next"}\n') + deflate.flush())
    tracemalloc.start()
    try:
        (_, bad), following = read_rows(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(bad, BadRow) and "96 MiB" in str(bad) and following == (2, {"prompt": "next"})
    assert most < 64 * 2**20


def test_a_chunk_holds_no_more_rows_than_it_should_have_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * 2**20}) + "\n" for _ in range(20)))
    assert max(len(chunk.content) for chunk in read_chunks(path)) <= 17
    pq.write_table(pa.Table.from_pylist([{"prompt": str(n) * 2**20} for n in range(20)]), tmp_path / "rows.parquet")
    assert max(len(chunk.content) for chunk in read_chunks(tmp_path / "rows.parquet")) <= 17


def test_a_file_that_is_one_value_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_WHOLE_MIB", 1)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a" * 2**20}, {"prompt": "b"}], indent=1))
    with pytest.raises(UserError, match=r"rows.json: it is one JSON value of more than 1 MiB.*an object a line"):
        list(read_rows(path))
