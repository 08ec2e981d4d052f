"""Files -> numbered rows, and what is said of files that cannot be read."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.rows import BadRow, read_rows
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
        "the line is not valid JSON",
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
        "the entry holds a int, not an object {…}",
        "the entry holds a NoneType, not an object {…}",
    ]
    assert isinstance(rows[4], BadRow) and "surrogates not allowed" in str(rows[4])


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        "\n" + json.dumps(ROWS),
        "\ufeff" + json.dumps(ROWS),
    ],
)
def test_a_list_on_one_line_and_a_byte_order_mark(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert [row for _, row in read_rows(path)] == ROWS


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").mkdir()
    with pytest.raises(UserError, match=r"part\.jsonl: .*directory"):
        list(read_rows(tmp_path / "part.jsonl"))
