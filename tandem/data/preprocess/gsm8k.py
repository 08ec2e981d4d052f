"""GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"): grade-school word problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.data.chat import check_text
from tandem.data.rows import BadRow, Row, read_rows
from tandem.errors import UserError
from tandem.files import replacing

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and give the final answer as a number on the last line, after "####".'
SPLITS = ("train", "test")
ENDINGS = (".jsonl.gz", ".jsonl")
"""Where both are there, the last is read."""
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def convert(source: Path, out: Path) -> dict[str, int]:
    """Write `<out>/<split>.parquet` of verl rows for each published file in the folder `source`, or for that one file.

    Returns rows in and out by split. Raises UserError, before anything is written, for a row that is not GSM8K's.
    """
    tables = {split: list(_read_split(path, split)) for split, path in _find_splits(source).items()}
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    for split, rows in tables.items():
        table = pa.Table.from_pylist(rows)
        with replacing(out / f"{split}.parquet") as path:
            pq.write_table(table, path)
        counts |= {f"{split}_in": len(rows), f"{split}_out": table.num_rows}
    return counts


def _find_splits(source: Path) -> dict[str, Path]:
    if source.is_file():
        return {source.name.split(".")[0]: source}
    candidates = [(split, source / (split + ending)) for split in SPLITS for ending in ENDINGS]
    found = {split: path for split, path in candidates if path.is_file()}
    if not found:
        names = " or ".join(path.name for _, path in candidates)
        raise UserError(f"{source}: holds no {names}; give the folder of the published files, or one such file")
    return found


def _read_split(path: Path, split: str) -> Iterator[Row]:
    for index, (number, row) in enumerate(read_rows(path)):
        try:
            yield _to_verl(row, split, index)
        except BadRow as bad:
            raise UserError(f"{path}, row {number}: {bad}; give the files as published") from bad


def _to_verl(row: Row | BadRow, split: str, index: int) -> Row:
    if isinstance(row, BadRow):
        raise row
    question, answer = check_text(row.get("question"), "question"), check_text(row.get("answer"), "answer")
    final = FINAL_ANSWER.search(answer)
    if final is None:
        raise BadRow("answer", "does not end with #### and a number", repr(answer[-40:]))
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
