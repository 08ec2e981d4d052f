"""GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"): grade-school word problems."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.data.rows import BadRow, Row, cell, read_rows
from tandem.errors import UserError
from tandem.files import replacing

INSTRUCTION = 'Think step by step, and give the final answer as a number on the last line, after "####".'
FILES = ("train.jsonl.gz", "train.jsonl", "test.jsonl.gz", "test.jsonl")
"""Of two for one split, the last is read."""
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def convert(source: Path, out: Path) -> dict[str, int]:
    """Write `<out>/<split>.parquet` of verl rows for each published file in the folder `source`, or for that one file.

    Returns rows by split. Raises UserError, before anything is written, for a row that is not GSM8K's.
    """
    paths = [source] if source.is_file() else [source / name for name in FILES if (source / name).is_file()]
    if not paths:
        raise UserError(f"{source}: holds no {' or '.join(FILES)}; give the folder of the published files, or one file")
    splits = {path.name.split(".")[0]: path for path in paths}
    tables = {split: _read_split(path, split) for split, path in splits.items()}
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        with replacing(out / f"{split}.parquet") as path:
            pq.write_table(pa.Table.from_pylist(rows), path)
    return {split: len(rows) for split, rows in tables.items()}


def _read_split(path: Path, split: str) -> list[Row]:
    rows: list[Row] = []
    for number, row in read_rows(path):
        try:
            rows.append(_to_verl(row, split, len(rows)))
        except BadRow as bad:
            raise UserError(f"{path}, row {number}: {bad}; give the files as published") from bad
    return rows


def _to_verl(row: Row | BadRow, split: str, index: int) -> Row:
    if isinstance(row, BadRow):
        raise row
    question, answer = cell(row, "question", str), cell(row, "answer", str)
    final = FINAL_ANSWER.search(answer)
    if final is None:
        raise BadRow(f"column `answer` does not end with #### and a number: {answer[-40:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
