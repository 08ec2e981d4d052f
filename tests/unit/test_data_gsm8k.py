"""Published GSM8K files -> parquet of verl rows."""

import gzip
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_tokenizer import char_tokenizer, write_lines

from tandem.config.data import DataConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.preprocess import CONVERTERS
from tandem.data.preprocess.convert import convert as convert_by
from tandem.errors import UserError

convert = partial(convert_by, CONVERTERS["gsm8k"])
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ROWS = [
    {"question": "A pen costs $2. How much are 600?", "answer": "600*2 = $<<600*2=1200>>1,200\n#### 1,200"},
    {"question": "It was 1 and fell by 3.5?", "answer": "1-3.5 = -2.5\n#### -2.5"},
]


def test_rows_become_verl_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS)
    assert convert(tmp_path, tmp_path / "out") == {"rows read": 2, "train": 2, "skipped": 0}
    first, second = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert list(first) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert (first["data_source"], first["ability"]) == ("openai/gsm8k", "math")
    (message,) = first["prompt"]
    assert message["role"] == "user" and message["content"].startswith(ROWS[0]["question"] + "\n")
    assert "####" in message["content"]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert second["reward_model"]["ground_truth"] == "-2.5"
    assert second["extra_info"] == {"split": "train", "index": 1, **ROWS[1]}


def test_the_source_may_be_one_file_or_gzipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl", ROWS)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert convert(path, tmp_path / "one") == {"rows read": 2, "test": 2, "skipped": 0}
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["test.parquet"]
    (tmp_path / "test.jsonl.gz").write_bytes(b"a copy of test.jsonl, which is there too")
    (tmp_path / "one" / "test.parquet").unlink()
    assert convert(tmp_path, tmp_path / "two") == {"rows read": 4, "train": 2, "test": 2, "skipped": 0}


def test_the_same_source_gives_the_same_bytes_and_no_other_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS)
    out = tmp_path / "out"
    convert(tmp_path, out)
    before = (out / "train.parquet").read_bytes()
    convert(tmp_path, out)
    assert (out / "train.parquet").read_bytes() == before
    assert [file.name for file in out.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a", "answer": "12"}, "column `answer` does not end with #### and a number"),
        ({"question": "a", "answer": "#### twelve"}, "column `answer` does not end with"),
        ({"question": "", "answer": "#### 1"}, "column `question` is empty"),
        ({"answer": "#### 1"}, "column `question` is missing"),
        ([], "the line holds a list"),
    ],
)
def test_a_row_that_is_not_gsm8k_leaves_nothing_behind(tmp_path: Path, row: Any, reason: str) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS)
    write_lines(tmp_path / "test.jsonl", [*ROWS, row])
    with pytest.raises(UserError, match=rf"test\.jsonl, row 3: {reason}"):
        convert(tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no data files"):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published GSM8K files are not in {PUBLISHED}")
def test_all_published_rows_convert_and_load(tmp_path: Path) -> None:
    assert convert(PUBLISHED, tmp_path) == {"rows read": 8792, "train": 7473, "test": 1319, "skipped": 0}
    config = DataConfig(max_prompt_tokens=2048)
    train, test = (
        RLHFDataset([tmp_path / f"{split}.parquet"], char_tokenizer(), config) for split in ("train", "test")
    )
    assert (len(train), len(test), train.skipped) == (7473, 1319, 0)
    assert train.descriptions == ["train.parquet: 7,473 verl rows; 0 skipped"]
    truths = [test[index].ground_truth for index in range(len(test))]
    assert [float(truth) for truth in truths] and not any("," in truth for truth in truths)
    assert test[0].ground_truth == "18"
    with_comma = [i for i in range(len(train)) if "," in train[i].row["extra_info"]["answer"].split("####")[1]]
    assert len(with_comma) == 79
